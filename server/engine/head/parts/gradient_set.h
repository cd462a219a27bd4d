// Every gradient of a head, and what is done with them: read, sum, fold, summarize, reset.
//
// A head has its backend's own gradient, perhaps a second one (double_buffer), and one for each deterministic
// session. What a window has accumulated is the sum of one of the first two and of those of the sessions.
//
// Belongs to the device thread; no lock. The pointers that it gives out may be compared and kept by any.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_GRADIENT_SET_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_GRADIENT_SET_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/window.h"

namespace lossd::engine {

// What a window has accumulated: the sum of these, in this order.
struct WindowGradient {
  Gradient* window = nullptr;       // GradientSet::Of
  std::vector<Gradient*> sessions;  // by rank, and among equals by their numbers
};

class GradientSet {
 public:
  // `backend` and `device` outlive it. `second`: null without double_buffer.
  GradientSet(const HeadConfig& config, HeadBackend* backend, Device* device,
              std::shared_ptr<Gradient> second);

  // The gradient of windows that accumulate in the first one, or in the second.
  Gradient* Of(bool second) const { return second ? second_address_ : nullptr; }
  bool has_second() const { return second_address_ != nullptr; }
  bool IsWindows(const Gradient* gradient) const {
    return gradient == nullptr || gradient == second_address_;
  }

  // Rows of the sum times `scale`, fp32 [rows, H], and of that of the bias, [rows].
  absl::Status ReadRows(const WindowGradient& of, float scale, int64_t first_row, int64_t rows, float* out);
  absl::Status ReadBias(const WindowGradient& of, float scale, int64_t first_row, int64_t rows, float* out);

  // Statistics of the sum times `scale`: a flush's answer, and what a trainer clips by.
  absl::StatusOr<GradientStats> Stats(const WindowGradient& of, double scale);

  // Adds those of the sessions to the window's, which holds the sum then; theirs are empty.
  absl::Status FoldSessions(const WindowGradient& of);
  // Adds the gradient of the next window to that of this one, which is in the second one or not.
  absl::Status FoldOther(bool in_second) { return backend_->Fold(Of(!in_second), Of(in_second)); }
  // All of them are empty.
  void Reset(const WindowGradient& of);

  // The second gradient, to be freed with the rest of the head.
  std::shared_ptr<Gradient> Release() { return std::move(second_); }

 private:
  using Read = absl::FunctionRef<absl::Status(const Gradient* gradient, float* values)>;
  static absl::Status Sum(const WindowGradient& of, float scale, int64_t count, float* out, Read read);
  // Calls `add` with every row of the sum, in order, some at a time.
  absl::Status ForEachPiece(const WindowGradient& of, float scale,
                            absl::FunctionRef<void(std::span<const float> rows)> add);
  absl::StatusOr<std::vector<float>> Bias(const WindowGradient& of, float scale);
  // Stats of a sum with sessions, which the device does not hold.
  absl::StatusOr<GradientStats> StatsHere(const WindowGradient& of, float scale);

  const int64_t vocab_size_;
  const int64_t hidden_size_;
  const bool bias_;
  HeadBackend* const backend_;
  Device* const device_;
  std::shared_ptr<Gradient> second_;
  Gradient* const second_address_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_GRADIENT_SET_H_
