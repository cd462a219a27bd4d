// The server's twin: the same formulas with plain matrix products in this process.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_LOCAL_HEAD_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_LOCAL_HEAD_H_

#include <vector>

#include "client/examples/train_lm/adam.h"
#include "client/examples/train_lm/head.h"
#include "client/examples/train_lm/thread_pool.h"

namespace lossd::train_lm {

class LocalHead final : public LossHead {
 public:
  // The pool must outlive the head.
  LocalHead(const HeadShape& shape, HeadPrecision precision, const AdamOptions& adam, ThreadPool* pool);

  absl::Status WriteWeights(std::span<const float> weights) override;
  absl::StatusOr<double> LossAndGradients(std::span<const int64_t> labels, std::span<const float> hidden,
                                          float gradient_scale, std::span<float> dx) override;
  absl::StatusOr<double> Loss(std::span<const int64_t> labels, std::span<const float> hidden) override;
  absl::Status Step(double learning_rate) override;
  absl::StatusOr<HeadReport> Report() override;
  HeadTraffic Traffic() const override { return {}; }

  // What was added since the last step.
  std::span<const float> gradient() const { return gradient_; }

 private:
  // Losses of one block of rows; leaves their probabilities in probabilities_ and the rounded rows in rows_.
  double Block(std::span<const int64_t> labels, std::span<const float> hidden);

  const HeadShape shape_;
  const HeadPrecision precision_;
  ThreadPool* const pool_;
  Adam adam_;
  std::vector<float> master_;
  std::vector<float> weights_;  // the master, of the head's precision
  std::vector<float> gradient_;
  std::vector<float> rows_;           // [block, H]
  std::vector<float> probabilities_;  // [block, V]
  std::vector<double> losses_;        // [block]
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_LOCAL_HEAD_H_
