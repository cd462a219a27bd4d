#include "client/examples/train_lm/adam.h"

#include <cmath>

#include "client/examples/train_lm/arithmetic.h"

namespace lossd::train_lm {
namespace {
constexpr int64_t kUpdateGranularity = 4096;
}  // namespace

Adam::Adam(int64_t parameters, const AdamOptions& options)
    : options_(options), first_(static_cast<size_t>(parameters)), second_(static_cast<size_t>(parameters)) {}

void Adam::Restore(const AdamState& state) {
  steps_ = state.steps;
  first_ = state.first;
  second_ = state.second;
}

void Adam::Step(double learning_rate, std::span<const float> gradient, std::span<float> parameters,
                ThreadPool* pool) {
  ++steps_;
  const auto steps = static_cast<double>(steps_);
  const AdamCoefficients coefficients = {
      .step_size = static_cast<float>(learning_rate / (1 - std::pow(options_.beta1, steps))),
      .decay = static_cast<float>(learning_rate * options_.weight_decay),
      .beta1 = static_cast<float>(options_.beta1),
      .beta2 = static_cast<float>(options_.beta2),
      .root_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(options_.beta2, steps))),
      .epsilon = static_cast<float>(options_.epsilon),
  };
  pool->For(static_cast<int64_t>(first_.size()), kUpdateGranularity, [&](int64_t begin, int64_t end) {
    BestArithmetic().adam(coefficients, gradient.data() + begin, first_.data() + begin,
                          second_.data() + begin, parameters.data() + begin, end - begin);
  });
}

}  // namespace lossd::train_lm
