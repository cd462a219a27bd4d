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

void ScaleAndCap(float scale, float cap, std::vector<float>& logits) {
  for (float& logit : logits) {
    logit *= scale;
    if (cap > 0) logit = cap * std::tanh(logit / cap);
  }
}

// log_softmax(logits / temperature).
std::vector<float> LogSoftmax(const std::vector<float>& logits, float temperature) {
  std::vector<float> result = logits;
  for (float& value : result) value /= temperature;
  const float largest = *std::max_element(result.begin(), result.end());
  float sum = 0;
  for (const float value : result) sum += std::exp(value - largest);
  const float log_sum = std::log(sum);
  for (float& value : result) value = value - largest - log_sum;
  return result;
}

// The teacher's logits [N, V], in its type.
std::vector<float> TeacherLogits(const Problem& problem) {
  const TeacherProblem& teacher = *problem.teacher;
  const int64_t n = problem.shape.tokens;
  const int64_t v = problem.shape.vocab;
  const int64_t h = teacher.hidden;
  std::vector<float> weight(static_cast<size_t>(v * h));
  std::vector<float> x(static_cast<size_t>(n * h));
  Convert(teacher.type, teacher.weight.data(), DataType::kFloat32, weight.data(), v * h);
  Convert(teacher.type, teacher.hidden_states.data(), DataType::kFloat32, x.data(), n * h);
  std::vector<float> logits(static_cast<size_t>(n * v));
  dnnl::sgemm('N', 'T', n, v, h, 1.0f, x.data(), h, weight.data(), h, 0.0f, logits.data(), v);
  if (!teacher.bias.empty()) {
    for (size_t i = 0; i < logits.size(); ++i) logits[i] += teacher.bias[i % static_cast<size_t>(v)];
  }
  Round(teacher.type, logits);
  ScaleAndCap(teacher.logit_scale, teacher.softcap, logits);
  return logits;
}

// D of a row as sums of its terms, and ∂D/∂s into `slopes`.
float DivergenceRow(const Distillation& options, const std::vector<float>& log_p,
                    const std::vector<float>& log_q, std::vector<float>* slopes) {
  const float beta = options.beta;
  const bool mixes = options.divergence == Divergence::kJensenShannon;
  std::vector<float> log_m = options.divergence == Divergence::kReverseKl ? log_p : log_q;
  if (mixes) {
    for (size_t v = 0; v < log_m.size(); ++v) {
      log_m[v] = std::log(beta * std::exp(log_p[v]) + (1 - beta) * std::exp(log_q[v]));
    }
  }
  const auto relative_entropy = [](const std::vector<float>& log_a, const std::vector<float>& log_b) {
    float sum = 0;
    for (size_t v = 0; v < log_a.size(); ++v) {
      // As kl_div: where a is 0 its term is.
      const float a = std::exp(log_a[v]);
      if (a > 0) sum += a * (log_a[v] - log_b[v]);
    }
    return sum;
  };
  const float of_teacher = relative_entropy(log_p, log_m);
  const float of_student = relative_entropy(log_q, log_m);
  for (size_t v = 0; v < log_q.size(); ++v) {
    const float q = std::exp(log_q[v]);
    const float slope = options.divergence == Divergence::kForwardKl
                            ? q - std::exp(log_p[v])
                            : (q > 0 ? q * (log_q[v] - log_m[v] - of_student) : 0.0f);
    (*slopes)[v] = (mixes ? 1 - beta : 1.0f) * slope / options.temperature;
  }
  if (mixes) return beta * of_teacher + (1 - beta) * of_student;
  return options.divergence == Divergence::kForwardKl ? of_teacher : of_student;
}

// Turns a row of logits into the gradient of everything it is part of, and returns the loss. `teacher`: its
// logits, or null.
float CrossEntropyRow(const Problem& problem, float* logits, const float* teacher, size_t row) {
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
  std::vector<float> soft_slopes(vocab, 0.0f);
  float soft_weight = 0;
  float label_weight = 1;
  float divergence = 0;
  if (teacher != nullptr) {
    const Distillation& distillation = problem.teacher->distillation;
    soft_weight = distillation.weight;
    label_weight = distillation.label_weight;
    divergence = DivergenceRow(
        distillation, LogSoftmax(std::vector<float>(teacher, teacher + vocab), distillation.temperature),
        LogSoftmax(std::vector<float>(logits, logits + vocab), distillation.temperature), &soft_slopes);
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
  const float share = label_weight * epsilon / static_cast<float>(vocab);
  const float own = label_weight * (1 - epsilon) * class_weight(label);
  const float a = problem.token_weights.empty() ? 1.0f : problem.token_weights[row];
  const float u = problem.lse_gradients.empty() ? 0.0f : problem.lse_gradients[row];
  const float omega = problem.entropy_gradients.empty() ? 0.0f : problem.entropy_gradients[row];
  float entropy = 0;
  for (size_t v = 0; v < vocab; ++v) {
    const float log_p = logits[v] - largest - log_sum;
    entropy -= std::exp(log_p) * log_p;
  }
  const float lambda = options.lse_square_scale;
  const float loss = a * (own * (log_sum - (logits[label] - largest)) + share * smooth + lambda * lse * lse +
                          soft_weight * divergence);
  const float g = problem.gradient_scale;
  const float g_z = problem.z_gradient_scale.value_or(g);
  for (size_t v = 0; v < vocab; ++v) {
    const float p = std::exp(logits[v] - largest - log_sum);
    const float slope = cap > 0 ? 1 - (logits[v] / cap) * (logits[v] / cap) : 1.0f;
    const float of_loss =
        a * g * (own * (v == label ? p - 1.0f : p) + share * (p * class_weight_sum - class_weight(v)));
    const float of_lse = (2 * a * g_z * lambda * lse + g * u) * p;
    const float of_teacher = a * g * soft_weight * soft_slopes[v];
    const float of_entropy = -g * omega * p * (logits[v] - largest - log_sum + entropy);
    logits[v] = options.logit_scale * slope * (of_loss + of_lse + of_teacher + of_entropy);
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
  std::vector<float> teacher_logits;
  if (problem.teacher.has_value()) teacher_logits = TeacherLogits(problem);
  UnfusedResult result;
  result.losses.resize(static_cast<size_t>(n));
  for (size_t r = 0; r < result.losses.size(); ++r) {
    const size_t first = r * static_cast<size_t>(v);
    const float* teacher = teacher_logits.empty() ? nullptr : &teacher_logits[first];
    result.losses[r] = CrossEntropyRow(problem, &logits[first], teacher, r);
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
