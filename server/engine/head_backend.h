// What a device does for one head. Narrow on purpose: everything about sessions, windows and versions stays
// above it.
//
// All calls come from the device's one owner thread (BatchScheduler), so an implementation needs no locks.
#ifndef LOSSD_SERVER_ENGINE_HEAD_BACKEND_H_
#define LOSSD_SERVER_ENGINE_HEAD_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/data_type.h"
#include "server/engine/head_config.h"
#include "server/engine/host_buffer.h"
#include "server/engine/memory_budget.h"

namespace lossd::engine {

// A batch of rows in host memory, checked by the caller. Pointers are not owned.
struct RowBatch {
  enum class Accumulate { kYes, kNo };

  int64_t tokens = 0;
  kernels::DataType hidden_type = kernels::DataType::kFloat32;
  const void* hidden_states = nullptr;  // [tokens, H]
  const int64_t* labels = nullptr;      // [tokens]
  int64_t ignore_index = -100;
  float gradient_scale = 1.0f;
  Accumulate accumulate = Accumulate::kYes;

  float* losses = nullptr;  // [tokens]
  kernels::DataType dx_type = kernels::DataType::kFloat32;
  void* dx = nullptr;  // [tokens, H] or null
};

struct BatchReport {
  int64_t valid_tokens = 0;
  int64_t rows_redone = 0;
};

class HeadBackend {
 public:
  virtual ~HeadBackend() = default;

  // Replaces the weights by `staged`, [V, H] of the head's dtype.
  virtual absl::Status PublishWeights(HostBuffer staged) = 0;
  // Rows [first_row, first_row + rows) converted to `type` into `out`.
  virtual absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) = 0;

  // Loss, dX and, if wanted, dW +=. `on_input_gradients` is called once when losses and dX are final, before
  // dW is. An error means the device can no longer be trusted: dW may hold part of the batch.
  virtual absl::StatusOr<BatchReport> ProcessBatch(const RowBatch& batch,
                                                   absl::FunctionRef<void()> on_input_gradients) = 0;

  // Rows of the gradient in fp32 (zeros if nothing was added since the last reset).
  virtual absl::Status ReadGradientRows(int64_t first_row, int64_t rows, float* out) = 0;
  // The next contribution overwrites instead of adding: no memset, no read of the old value.
  virtual void ResetGradient() = 0;

  // What the head holds on the device.
  virtual MemoryPlan MemoryReport() const = 0;
};

// A device that heads are created on.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;         // "cpu"
  virtual std::string description() const = 0;  // for people
  // What heads and the device's own buffers may take together.
  virtual int64_t AvailableMemory() const = 0;
  // What a head would need, before anything is taken. INVALID_ARGUMENT if the device can never hold it.
  virtual absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const = 0;
  // Takes the memory. RESOURCE_EXHAUSTED if the system does not give it.
  virtual absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) = 0;
  // Memory that belongs to the device rather than to a head.
  virtual MemoryPlan SharedMemory() const = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_BACKEND_H_
