#include "server/engine/device/optimizer_state.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {

using kernels::DataType;
using kernels::OptimizerArguments;
using kernels::OptimizerRule;

absl::StatusOr<kernels::OptimizerCoefficients> CoefficientsFor(const HeadConfig& config,
                                                               const StepArguments& arguments) {
  const OptimizerConfig& optimizer = arguments.optimizer;
  if (config.optimizer.kind == OptimizerKind::kNone || optimizer.kind != config.optimizer.kind) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "optimizer",
                     absl::StrCat("head ", config.name,
                                  " has no optimizer of this kind; create it with the one that steps take"));
  }
  OptimizerArguments of_kernel;
  of_kernel.rule = optimizer.kind == OptimizerKind::kSgd    ? OptimizerRule::kSgd
                   : optimizer.kind == OptimizerKind::kAdam ? OptimizerRule::kAdam
                                                            : OptimizerRule::kAdamW;
  of_kernel.learning_rate = arguments.learning_rate;
  of_kernel.gradient_scale = arguments.gradient_scale;
  of_kernel.weight_decay = optimizer.weight_decay;
  of_kernel.momentum = optimizer.momentum;
  of_kernel.dampening = optimizer.dampening;
  of_kernel.nesterov = optimizer.nesterov;
  of_kernel.beta1 = optimizer.beta1;
  of_kernel.beta2 = optimizer.beta2;
  of_kernel.eps = optimizer.eps;
  of_kernel.maximize = optimizer.maximize;
  of_kernel.step = arguments.step;
  const kernels::OptimizerCoefficients coefficients = kernels::CoefficientsOf(of_kernel);
  if (coefficients.moments > config.optimizer.moments()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kOption, "momentum",
                     absl::StrCat("momentum is ", optimizer.momentum, "; head ", config.name,
                                  " was created with momentum 0 and keeps no buffer for it"));
  }
  return coefficients;
}

std::vector<StateEntry> StateEntriesOf(const HeadConfig& config) {
  std::vector<StateEntry> entries;
  const auto add = [&](const std::string& name, DataType type, StatePart part) {
    entries.push_back({{name, type, config.vocab_size, config.hidden_size}, part, StateOf::kMatrix});
  };
  const auto add_bias = [&](const std::string& name, StatePart part) {
    if (!config.bias) return;
    entries.push_back({{name, DataType::kFloat32, config.vocab_size, 1}, part, StateOf::kBias});
  };
  if (config.master_weights) {
    add(kMasterTensor, DataType::kFloat32, StatePart::kMaster);
  } else {
    add("weight", config.weight_type, StatePart::kWeight);
  }
  add_bias("bias", StatePart::kWeight);
  const auto add_moment = [&](const std::string& name, StatePart part) {
    add(name, DataType::kFloat32, part);
    add_bias(absl::StrCat("bias.", name), part);
  };
  const bool sgd = config.optimizer.kind == OptimizerKind::kSgd;
  if (config.optimizer.moments() > 0) {
    add_moment(sgd ? "momentum_buffer" : "exp_avg", StatePart::kFirstMoment);
  }
  if (config.optimizer.moments() > 1) add_moment("exp_avg_sq", StatePart::kSecondMoment);
  return entries;
}

std::vector<StateTensor> StateTensorsOf(const HeadConfig& config) {
  std::vector<StateTensor> tensors;
  for (StateEntry& entry : StateEntriesOf(config)) tensors.push_back(std::move(entry.tensor));
  return tensors;
}

absl::StatusOr<StateEntry> FindState(const HeadConfig& config, const std::string& name) {
  for (StateEntry& entry : StateEntriesOf(config)) {
    if (entry.tensor.name == name) return std::move(entry);
  }
  return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, "tensor",
                   absl::StrCat("tensor is '", name, "'; head ", config.name, " has none of that name"));
}

}  // namespace lossd::engine
