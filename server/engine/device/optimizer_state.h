// What backends have in common of optimizers, masters and checkpoints: how a step's arguments become the
// kernels', and which tensors a head consists of.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_OPTIMIZER_STATE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_OPTIMIZER_STATE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/optimizer.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// FAILED_PRECONDITION if the head has no optimizer, or none with the moments that this step needs.
absl::StatusOr<kernels::OptimizerCoefficients> CoefficientsFor(const HeadConfig& config,
                                                               const StepArguments& arguments);

enum class StatePart { kWeight, kMaster, kFirstMoment, kSecondMoment };
enum class StateOf { kMatrix, kBias };

struct StateEntry {
  StateTensor tensor;
  StatePart part = StatePart::kWeight;
  StateOf of = StateOf::kMatrix;
};

// The master alone stands for 16-bit weights that have one: the weights follow from it.
std::vector<StateEntry> StateEntriesOf(const HeadConfig& config);
std::vector<StateTensor> StateTensorsOf(const HeadConfig& config);
// INVALID_ARGUMENT if the head has none of that name.
absl::StatusOr<StateEntry> FindState(const HeadConfig& config, const std::string& name);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_OPTIMIZER_STATE_H_
