// The options of a new head beyond its sizes and dtype: of "head create" and of "head load --create".
#ifndef LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_OPTIONS_H_
#define LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "lossd/client.h"

namespace lossd::tools {

struct HeadOptions {
  float logit_scale = 1.0F;
  float softcap = 0.0F;
  bool frozen = false;
  bool bias = false;
  std::string optimizer = "none";
  std::optional<double> weight_decay = {};  // the optimizer's default
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  bool maximize = false;
  bool master_weights = false;
  bool double_buffer = false;
  bool fixed_segments = false;
  uint64_t held_bytes = 0;
};

// All of them, in the order of --help; `options` outlives the command.
std::vector<CLI::Option*> AddHeadOptions(CLI::App& command, HeadOptions& options);

HeadConfig WithOptions(HeadConfig config, const HeadOptions& options);

// "AdamW (weight decay 0.01, betas 0.9 and 0.999, eps 1e-08)"; empty without one.
std::string DescribeOptimizer(const OptimizerConfig& optimizer);

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_OPTIONS_H_
