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

// Turns a row of logits into the gradient of everything it is part of, and returns the loss.
float CrossEntropyRow(const Problem& problem, float* logits, size_t row) {
  const LossOptions& options = problem.options;
  const auto vocab = static_cast<size_t>(problem.shape.vocab);
  const auto label = static_cast<size_t>(problem.labels[row]);
  const auto class_weight = [&](size_t v) {
    return problem.class_weights.empty() ? 1.0f : problem.class_weights[v];
  };
  const float cap = options.softcap;
  for (size_t v = 0; v < vocab; ++v) {
    logits[v] *= options.logit_scale;
    if (cap > 0) logits[v] = cap * std::tanh(logits[v] / cap);
  }
  const float largest = *std::max_element(logits, logits + vocab);
  float sum = 0;
  for (size_t v = 0; v < vocab; ++v) sum += std::exp(logits[v] - largest);
  const float log_sum = std::log(sum);
  const float lse = largest + log_sum;
  float smooth = 0;
  float class_weight_sum = 0;
  for (size_t v = 0; v < vocab; ++v) {
    smooth += class_weight(v) * (log_sum - (logits[v] - largest));
    class_weight_sum += class_weight(v);
  }
  const float epsilon = options.label_smoothing;
  const float share = epsilon / static_cast<float>(vocab);
  const float own = (1 - epsilon) * class_weight(label);
  const float a = problem.token_weights.empty() ? 1.0f : problem.token_weights[row];
  const float u = problem.lse_gradients.empty() ? 0.0f : problem.lse_gradients[row];
  const float lambda = options.lse_square_scale;
  const float loss = a * (own * (log_sum - (logits[label] - largest)) + share * smooth + lambda * lse * lse);
  const float g = problem.gradient_scale;
  const float g_z = problem.z_gradient_scale.value_or(g);
  for (size_t v = 0; v < vocab; ++v) {
    const float p = std::exp(logits[v] - largest - log_sum);
    const float slope = cap > 0 ? 1 - (logits[v] / cap) * (logits[v] / cap) : 1.0f;
    const float of_loss =
        a * g * (own * (v == label ? p - 1.0f : p) + share * (p * class_weight_sum - class_weight(v)));
    const float of_lse = (2 * a * g_z * lambda * lse + g * u) * p;
    logits[v] = options.logit_scale * slope * (of_loss + of_lse);
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
  if (!problem.bias.empty()) {
    for (size_t i = 0; i < logits.size(); ++i) logits[i] += problem.bias[i % static_cast<size_t>(v)];
  }
  Round(problem.weight_type, logits);
  UnfusedResult result;
  result.losses.resize(static_cast<size_t>(n));
  for (size_t r = 0; r < result.losses.size(); ++r) {
    result.losses[r] = CrossEntropyRow(problem, &logits[r * static_cast<size_t>(v)], r);
  }
  Round(problem.weight_type, logits);
  result.dx.resize(static_cast<size_t>(n * h));
  result.dw.resize(static_cast<size_t>(v * h));
  result.db.resize(static_cast<size_t>(v));
  for (size_t i = 0; i < logits.size(); ++i) result.db[i % static_cast<size_t>(v)] += logits[i];
  dnnl::sgemm('N', 'N', n, h, v, 1.0f, logits.data(), v, weight.data(), h, 0.0f, result.dx.data(), h);
  dnnl::sgemm('T', 'N', v, h, n, 1.0f, logits.data(), v, x.data(), h, 0.0f, result.dw.data(), h);
  return result;
}

}  // namespace lossd::kernels::testing
