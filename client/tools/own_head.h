// The end of a head that a program made for its own run alone.
#ifndef LOSSD_CLIENT_TOOLS_OWN_HEAD_H_
#define LOSSD_CLIENT_TOOLS_OWN_HEAD_H_

#include <string>

#include "lossd/client.h"

namespace lossd::tools {

// Deletes head `name`, whatever gradient it holds. A head that stays, as after a run with a token of the role
// trainer, holds memory of the server: standard error then says so, and how to remove it.
void DeleteOwnHead(Client& client, const std::string& name, const std::string& program);

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_OWN_HEAD_H_
