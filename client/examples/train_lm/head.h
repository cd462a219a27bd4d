// The last stage of the model as the trainer sees it: initial weights W [V, H] go in, then hidden states and
// labels; losses and dX come out. Once a step the head's own AdamW consumes dW, which never leaves it.
// RemoteHead asks a lossd server; LocalHead is its twin in this process.
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

// Bytes to and from the head so far; none of one in this process.
struct HeadTraffic {
  int64_t sent = 0;
  int64_t received = 0;
};

class LossHead {
 public:
  virtual ~LossHead() = default;

  // All rows, fp32, which stay the master of what the head computes with: the same rounded to its precision.
  virtual absl::Status WriteWeights(std::span<const float> weights) = 0;

  // Sum of the losses of hidden [N, H] under labels [N]; writes gradient_scale · d(sum)/d(hidden) to dx [N,
  // H] and adds the likewise scaled weight gradient to dW.
  virtual absl::StatusOr<double> LossAndGradients(std::span<const int64_t> labels,
                                                  std::span<const float> hidden, float gradient_scale,
                                                  std::span<float> dx) = 0;
  // The sum of losses alone.
  virtual absl::StatusOr<double> Loss(std::span<const int64_t> labels, std::span<const float> hidden) = 0;

  // One step of AdamW by dW, which starts again from zero.
  virtual absl::Status Step(double learning_rate) = 0;

  // Everything that the head is, between two steps, where it survives the process that holds it.
  virtual absl::Status Save(const std::string& /*tag*/) {
    return absl::UnimplementedError("this head cannot be saved");
  }

  virtual absl::StatusOr<HeadReport> Report() = 0;
  virtual HeadTraffic Traffic() const = 0;
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_HEAD_H_
