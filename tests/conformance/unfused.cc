#include "tests/conformance/unfused.h"

#include <algorithm>
#include <cmath>
#include <dnnl.hpp>

namespace lossd::kernels::testing {
namespace {

// Rounds to `type` and back.
void Round(DataType type, std::vector<float>& values) {
  const std::vector<unsigned char> narrow = Narrowed(type, values);
  Convert(type, narrow.data(), DataType::kFloat32, values.data(), static_cast<int64_t>(values.size()));
}

// Turns a row of logits into the gradient of scale * loss, and returns the loss.
float CrossEntropyRow(float* logits, int64_t vocab, int64_t label, float scale) {
  const float largest = *std::max_element(logits, logits + vocab);
  float sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(logits[v] - largest);
  const float log_sum = std::log(sum);
  const float loss = log_sum - (logits[label] - largest);
  for (int64_t v = 0; v < vocab; ++v) {
    const float p = std::exp(logits[v] - largest - log_sum);
    logits[v] = scale * (v == label ? p - 1.0f : p);
  }
  return loss;
}

}  // namespace

UnfusedResult RunUnfused(const Problem& problem) {
  const auto [n, v, h] = problem.shape;
  const std::vector<float> weight = problem.Weight();
  const std::vector<float> x = problem.HiddenStates();
  // bf16 values multiply exactly in fp32, so fp32 products of them are bf16 products with fp32 accumulation.
  std::vector<float> logits(static_cast<size_t>(n * v));
  dnnl::sgemm('N', 'T', n, v, h, 1.0f, x.data(), h, weight.data(), h, 0.0f, logits.data(), v);
  Round(problem.weight_type, logits);
  UnfusedResult result;
  result.losses.resize(static_cast<size_t>(n));
  for (int64_t r = 0; r < n; ++r) {
    result.losses[r] = CrossEntropyRow(&logits[r * v], v, problem.labels[r], problem.gradient_scale);
  }
  Round(problem.weight_type, logits);
  result.dx.resize(static_cast<size_t>(n * h));
  result.dw.resize(static_cast<size_t>(v * h));
  dnnl::sgemm('N', 'N', n, h, v, 1.0f, logits.data(), v, weight.data(), h, 0.0f, result.dx.data(), h);
  dnnl::sgemm('T', 'N', v, h, n, 1.0f, logits.data(), v, x.data(), h, 0.0f, result.dw.data(), h);
  return result;
}

}  // namespace lossd::kernels::testing
