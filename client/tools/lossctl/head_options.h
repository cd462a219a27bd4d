// The options of a new head beyond its sizes and dtype: of "head create" and of "head load --create".
#ifndef LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_OPTIONS_H_
#define LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_OPTIONS_H_

#include <cstdint>
#include <vector>

#include "CLI/App.hpp"
#include "lossd/client.h"

namespace lossd::tools {

struct HeadOptions {
  float logit_scale = 1.0F;
  float softcap = 0.0F;
  bool frozen = false;
  bool bias = false;
  int64_t deferred_bytes = 0;
};

// All of them, in the order of --help; `options` outlives the command.
std::vector<CLI::Option*> AddHeadOptions(CLI::App& command, HeadOptions& options);

HeadConfig WithOptions(HeadConfig config, const HeadOptions& options);

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_OPTIONS_H_
