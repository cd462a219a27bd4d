#include "client/examples/train_lm/local_head.h"

#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "client/examples/train_lm/arithmetic.h"
#include "client/examples/train_lm/parallel_product.h"

namespace lossd::train_lm {
namespace {

constexpr size_t kBlockRows = 512;
constexpr int64_t kLogitGranularity = 4;

// To the nearest bf16 value, ties to even; finite values only.
float RoundToBFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) & 0xFFFF0000U);
}

std::vector<float> Rounded(std::span<const float> values, HeadPrecision precision) {
  std::vector<float> rounded(values.begin(), values.end());
  if (precision == HeadPrecision::kBFloat16) {
    std::ranges::transform(rounded, rounded.begin(), RoundToBFloat16);
  }
  return rounded;
}

}  // namespace

LocalHead::LocalHead(const HeadShape& shape, HeadPrecision precision, const AdamOptions& adam,
                     ThreadPool* pool)
    : shape_(shape),
      precision_(precision),
      pool_(pool),
      adam_(shape.Elements(), adam),
      master_(static_cast<size_t>(shape.Elements())),
      weights_(static_cast<size_t>(shape.Elements())),
      gradient_(static_cast<size_t>(shape.Elements())) {}

absl::Status LocalHead::WriteWeights(std::span<const float> weights) {
  std::ranges::copy(weights, master_.begin());
  weights_ = Rounded(master_, precision_);
  return absl::OkStatus();
}

double LocalHead::Block(std::span<const int64_t> labels, std::span<const float> hidden) {
  const auto rows = static_cast<int64_t>(labels.size());
  rows_ = Rounded(hidden, precision_);
  probabilities_.resize(static_cast<size_t>(rows * shape_.vocabulary));
  losses_.resize(labels.size());
  ProductBt(rows_.data(), weights_.data(), probabilities_.data(),
            {.m = rows, .n = shape_.vocabulary, .k = shape_.hidden}, pool_);
  pool_->For(rows, kLogitGranularity, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      losses_[static_cast<size_t>(row)] =
          BestArithmetic().softmax(probabilities_.data() + row * shape_.vocabulary, shape_.vocabulary,
                                   labels[static_cast<size_t>(row)]);
    }
  });
  return std::accumulate(losses_.begin(), losses_.end(), 0.0);
}

absl::StatusOr<double> LocalHead::LossAndGradients(std::span<const int64_t> labels,
                                                   std::span<const float> hidden, float gradient_scale,
                                                   std::span<float> dx) {
  const auto width = static_cast<size_t>(shape_.hidden);
  double sum = 0;
  for (size_t first = 0; first < labels.size(); first += kBlockRows) {
    const size_t rows = std::min(kBlockRows, labels.size() - first);
    sum += Block(labels.subspan(first, rows), hidden.subspan(first * width, rows * width));
    // Probabilities become the gradient of the logits.
    for (size_t row = 0; row < rows; ++row) {
      probabilities_[row * static_cast<size_t>(shape_.vocabulary) +
                     static_cast<size_t>(labels[first + row])] -= 1;
    }
    for (float& p : probabilities_) p *= gradient_scale;
    const auto block = static_cast<int64_t>(rows);
    Product(probabilities_.data(), weights_.data(), dx.data() + first * width,
            {.m = block, .n = shape_.hidden, .k = shape_.vocabulary}, pool_);
    AccumulateAt(probabilities_.data(), rows_.data(), gradient_.data(),
                 {.m = shape_.vocabulary, .n = shape_.hidden, .k = block}, pool_);
  }
  return sum;
}

absl::StatusOr<double> LocalHead::Loss(std::span<const int64_t> labels, std::span<const float> hidden) {
  const auto width = static_cast<size_t>(shape_.hidden);
  double sum = 0;
  for (size_t first = 0; first < labels.size(); first += kBlockRows) {
    const size_t rows = std::min(kBlockRows, labels.size() - first);
    sum += Block(labels.subspan(first, rows), hidden.subspan(first * width, rows * width));
  }
  return sum;
}

absl::Status LocalHead::Step(double learning_rate) {
  adam_.Step(learning_rate, gradient_, master_, pool_);
  weights_ = Rounded(master_, precision_);
  std::ranges::fill(gradient_, 0.0f);
  return absl::OkStatus();
}

absl::StatusOr<HeadReport> LocalHead::Report() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  constexpr int64_t kKibibyte = 1024;
  return HeadReport{absl::StrCat("cpu, ", BestArithmetic().name), usage.ru_maxrss * kKibibyte};
}

}  // namespace lossd::train_lm
