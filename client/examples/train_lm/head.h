// The last stage of the model as the trainer sees it: weights W [V, H] go in, then hidden states and labels;
// losses, dX and, once a step, dW come out. RemoteHead asks a lossd server; LocalHead is its twin in this
// process.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_HEAD_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_HEAD_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lossd::train_lm {

// Arithmetic of the head: fp32, or weights and hidden states rounded to bf16 with fp32 sums.
enum class HeadPrecision { kFloat32, kBFloat16 };

struct HeadShape {
  int64_t vocabulary = 0;
  int64_t hidden = 0;

  int64_t Elements() const { return vocabulary * hidden; }
};

struct HeadReport {
  std::string device;
  int64_t peak_bytes = 0;  // largest resident memory of the process that holds the head
};

class LossHead {
 public:
  virtual ~LossHead() = default;

  // All rows, fp32; rounded to the head's precision.
  virtual absl::Status WriteWeights(std::span<const float> weights) = 0;

  // Sum of the losses of hidden [N, H] under labels [N]; writes gradient_scale · d(sum)/d(hidden) to dx [N,
  // H] and adds the likewise scaled weight gradient to dW.
  virtual absl::StatusOr<double> LossAndGradients(std::span<const int64_t> labels,
                                                  std::span<const float> hidden, float gradient_scale,
                                                  std::span<float> dx) = 0;
  // The sum of losses alone.
  virtual absl::StatusOr<double> Loss(std::span<const int64_t> labels, std::span<const float> hidden) = 0;

  // Writes dW [V, H] and starts again from zero.
  virtual absl::Status TakeGradient(std::span<float> dw) = 0;

  virtual absl::StatusOr<HeadReport> Report() = 0;
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_HEAD_H_
