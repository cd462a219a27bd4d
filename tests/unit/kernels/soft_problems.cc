#include "tests/unit/kernels/soft_problems.h"

#include <cmath>
#include <utility>
#include <vector>

namespace lossd::kernels::testing {
namespace {

// Values between -1 and 1 that repeat after a while.
float Pattern(int64_t i) { return static_cast<float>(i * 37 % 101) / 50.0f - 1.0f; }

std::vector<float> Widened(DataType type, const std::vector<unsigned char>& values) {
  const auto count = static_cast<int64_t>(values.size()) / SizeOf(type);
  std::vector<float> wide(static_cast<size_t>(count));
  Convert(type, values.data(), DataType::kFloat32, wide.data(), count);
  return wide;
}

}  // namespace

Problem SoftProblem(const Shape& shape, DataType type, Divergence divergence) {
  Problem problem = RandomProblem({.shape = shape, .type = type, .logit_deviation = 2.0});
  const DataType other = type == DataType::kFloat32    ? DataType::kFloat32
                         : type == DataType::kBFloat16 ? DataType::kFloat16
                                                       : DataType::kBFloat16;
  problem.teacher = RandomTeacher(shape, {.hidden = 11,
                                          .type = other,
                                          .logit_deviation = 1.5,
                                          .distillation = {.divergence = divergence, .weight = 0.75f}});
  return problem;
}

std::vector<int> SoftOptionPairs() {
  std::vector<int> numbers = {0};
  for (int one = 1; one <= kAllSoftOptions; one *= 2) {
    for (int other = one; other <= kAllSoftOptions; other *= 2) numbers.push_back(one | other);
  }
  numbers.push_back(kAllSoftOptions);
  return numbers;
}

void UseWithSoftTargets(Problem& problem, int options) {
  const auto has = [options](int bit) { return (options >> bit & 1) != 0; };
  TeacherProblem& teacher = *problem.teacher;
  const auto [tokens, vocab, hidden] = problem.shape;
  if (has(0)) teacher.distillation.temperature = 2.5f;
  if (has(1)) teacher.distillation.label_weight = 0.5f;
  if (has(2)) {
    problem.options.label_smoothing = 0.1f;
    problem.class_weights.resize(static_cast<size_t>(vocab));
    for (int64_t v = 0; v < vocab; ++v) problem.class_weights[v] = std::fabs(Pattern(v + 3));
  }
  if (has(3)) {
    problem.options.softcap = 3.0f;
    problem.options.logit_scale = 0.7f;
    teacher.softcap = 4.0f;
    teacher.logit_scale = 1.3f;
  }
  if (has(4)) {
    problem.token_weights.resize(static_cast<size_t>(tokens));
    for (int64_t r = 0; r < tokens; ++r) problem.token_weights[r] = 2 * Pattern(r);
  }
  if (has(5)) {
    problem.options.lse_square_scale = 0.01f;
    problem.z_gradient_scale = 1.7f * problem.gradient_scale;
    problem.lse_gradients.resize(static_cast<size_t>(tokens));
    for (int64_t r = 0; r < tokens; ++r) problem.lse_gradients[r] = Pattern(r + 20);
    teacher.distillation.beta = 0.1f;
  }
  if (has(6)) {
    problem.entropy_gradients.resize(static_cast<size_t>(tokens));
    for (int64_t r = 0; r < tokens; ++r) problem.entropy_gradients[r] = Pattern(r + 35);
  }
}

Problem Nearly(const Shape& shape, DataType type, Divergence divergence, float change) {
  Problem problem = RandomProblem({.shape = shape, .type = type, .logit_deviation = 2.0});
  problem.teacher = Itself(problem, {.divergence = divergence});
  std::vector<float> weight = Widened(type, problem.teacher->weight);
  for (size_t i = 0; i < weight.size(); ++i) {
    weight[i] *= 1.0f + change * Pattern(static_cast<int64_t>(i));
  }
  problem.teacher->type = DataType::kFloat32;
  problem.teacher->hidden_states =
      Narrowed(DataType::kFloat32, Widened(type, problem.teacher->hidden_states));
  problem.teacher->weight = Narrowed(DataType::kFloat32, weight);
  return problem;
}

void SetTeacherLogit(Problem& problem, int64_t row, int64_t entry, float value) {
  TeacherProblem& teacher = *problem.teacher;
  Problem head;
  head.shape = {problem.shape.tokens, problem.shape.vocab, teacher.hidden};
  head.weight_type = teacher.type;
  head.hidden_type = teacher.type;
  head.weight = teacher.weight;
  head.hidden_states = teacher.hidden_states;
  SetLogit(head, row, entry, value);
  teacher.weight = std::move(head.weight);
  teacher.hidden_states = std::move(head.hidden_states);
}

Problem PartOf(const Problem& whole, int64_t first, int64_t count) {
  Problem part = whole;
  const auto cut = [&](auto& values, int64_t width) {
    if (!values.empty()) values = {values.begin() + first * width, values.begin() + (first + count) * width};
  };
  part.shape.tokens = count;
  cut(part.hidden_states, whole.shape.hidden * SizeOf(whole.hidden_type));
  cut(part.labels, 1);
  cut(part.token_weights, 1);
  cut(part.lse_gradients, 1);
  cut(part.entropy_gradients, 1);
  if (part.teacher.has_value()) {
    cut(part.teacher->hidden_states, part.teacher->hidden * SizeOf(part.teacher->type));
  }
  return part;
}

}  // namespace lossd::kernels::testing
