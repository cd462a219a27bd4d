#include "client/tools/own_head.h"

#include <cstdio>

#include "absl/strings/str_cat.h"

namespace lossd::tools {

void DeleteOwnHead(Client& client, const std::string& name, const std::string& program) {
  const absl::Status deleted = client.DeleteHead(name, /*discard_gradient=*/true);
  if (deleted.ok() || absl::IsNotFound(deleted)) return;
  std::fputs(absl::StrCat(program, ": head '", name, "' stays on the server: ", deleted.message(),
                          "; an admin can remove it: lossctl head delete ", name, " --discard-gradient\n")
                 .c_str(),
             stderr);
}

}  // namespace lossd::tools
