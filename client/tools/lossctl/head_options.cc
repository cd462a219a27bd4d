#include "client/tools/lossctl/head_options.h"

#include "CLI/Option.hpp"
#include "CLI/Validators.hpp"

namespace lossd::tools {

std::vector<CLI::Option*> AddHeadOptions(CLI::App& command, HeadOptions& options) {
  return {
      command.add_option("--logit_scale", options.logit_scale, "Multiplies the logits (default: 1)")
          ->type_name("SCALE"),
      command
          .add_option("--softcap", options.softcap, "Caps the logits: C * tanh(logit / C) (default: 0, none)")
          ->type_name("C"),
      command.add_flag("--frozen", options.frozen,
                       "The weight is not trained: no memory for its gradient, and no flush"),
      command.add_flag("--bias", options.bias,
                       "Beside the weight there is a bias, loaded and flushed with it"),
      command
          .add_option("--deferred-bytes", options.deferred_bytes,
                      "Answer before dW is made, and keep so many bytes of hidden states for it: 512M, 2G "
                      "(default: 0)")
          ->type_name("BYTES")
          ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))};
}

HeadConfig WithOptions(HeadConfig config, const HeadOptions& options) {
  config.logit_scale = options.logit_scale;
  config.softcap = options.softcap;
  config.frozen = options.frozen;
  config.bias = options.bias;
  config.deferred_bytes = options.deferred_bytes;
  return config;
}

}  // namespace lossd::tools
