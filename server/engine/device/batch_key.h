// What chunks must have in common to be computed in one batch.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_BATCH_KEY_H_
#define LOSSD_SERVER_ENGINE_DEVICE_BATCH_KEY_H_

#include <cstdint>

#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/shard.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/chunk/token_lists.h"

namespace lossd::engine {

class Gradient;
class HeadBackend;

// Soft targets: none without a backend.
struct TeacherKind {
  // A backend of the same device. Gone with its head while a chunk waits, so for comparison only until a
  // batch is started, for which it is there.
  const HeadBackend* backend = nullptr;
  uint64_t head_number = 0;  // of the teacher's head: its backend's address may once have been another's
  int64_t hidden_size = 0;
  kernels::DataType weight_type = kernels::DataType::kFloat32;
  kernels::DataType hidden_type = kernels::DataType::kFloat32;
  kernels::Distillation distillation = {};

  bool operator==(const TeacherKind&) const = default;
};

// What the chunks of one batch have in common.
struct BatchKey {
  kernels::DataType hidden_type = kernels::DataType::kFloat32;
  kernels::DataType dx_type = kernels::DataType::kFloat32;  // without dX: as it is by default
  ComputeMode mode = ComputeMode::kLossAndGradients;
  kernels::LossOptions options = {};
  ClassWeights class_weights = ClassWeights::kIgnore;
  Bias bias = Bias::kIgnore;  // kUse only if the head has one
  WantedReturns returns = {};
  // Whether chunks have upstream gradients of the entropy: their rows' gradients are then formed in another
  // way, whatever the values are, and have other bits.
  bool entropy_gradients = false;
  // Whether something is wanted to be held of the rows, or was: chunks of which nothing is held have their
  // batch computed again as a whole.
  bool holds = false;
  ListKind lists = {};
  TeacherKind teacher = {};
  kernels::Segments segments = kernels::Segments::kOfRanks;  // kFixed only if the device has them
  Gradient* gradient = nullptr;                              // what dW is added to; null: the head's own
  // Over ranks: the one that has the hidden states and gets losses, returns and dX.
  int32_t holder = 0;

  bool operator==(const BatchKey&) const = default;
};

// The kind of a chunk that ValidateContent accepts: chunks of another kind are computed in another batch.
// `teacher` and its backend: of the chunk's distillation, null without one.
BatchKey KindOf(const Chunk& chunk, const HeadConfig& head, const HeadConfig* teacher = nullptr,
                const HeadBackend* teacher_backend = nullptr);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_BATCH_KEY_H_
