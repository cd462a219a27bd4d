#include "client/tools/lossctl/head_options.h"

#include "CLI/Option.hpp"

namespace lossd::tools {

std::vector<CLI::Option*> AddHeadOptions(CLI::App& command, HeadOptions& options) {
  return {
      command.add_option("--logit_scale", options.logit_scale, "Multiplies the logits (default: 1)")
          ->type_name("SCALE"),
      command
          .add_option("--softcap", options.softcap, "Caps the logits: C * tanh(logit / C) (default: 0, none)")
          ->type_name("C"),
      command.add_flag("--frozen", options.frozen,
                       "The weight is not trained: no memory for its gradient, and no flush")};
}

HeadConfig WithOptions(HeadConfig config, const HeadOptions& options) {
  config.logit_scale = options.logit_scale;
  config.softcap = options.softcap;
  config.frozen = options.frozen;
  return config;
}

}  // namespace lossd::tools
