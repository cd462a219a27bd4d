#include "tests/unit/kernels/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/cpu/tile_memory.h"

namespace lossd::kernels::testing {
namespace {

constexpr int64_t kGuardBytes = 4096;
constexpr unsigned char kGuardByte = 0xa5;

std::vector<float> Normal(int64_t count, double deviation, std::mt19937_64& random) {
  std::normal_distribution<float> distribution(0.0f, static_cast<float>(deviation));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(random);
  return values;
}

std::vector<float> Widened(DataType type, const void* values, int64_t count) {
  std::vector<float> wide(static_cast<size_t>(count));
  Convert(type, values, DataType::kFloat32, wide.data(), count);
  return wide;
}

// NaN where there are no values.
void FillWith(const std::vector<float>& values, GuardedBytes& bytes) {
  std::fill_n(bytes.As<float>(), bytes.size() / 4, std::numeric_limits<float>::quiet_NaN());
  std::copy(values.begin(), values.end(), bytes.As<float>());
}

// The arrays of RowReturns beyond the log-sum-exp.
class GuardedReturns {
 public:
  GuardedReturns(int64_t tokens, int32_t top_k) : tokens_(tokens), top_k_(top_k) {
    const int64_t counts[] = {tokens, tokens, tokens, tokens, tokens, tokens * top_k, tokens * top_k, tokens};
    for (const int64_t count : counts) arrays_.emplace_back(count * 4, 64, 4);
  }
  void Attach(RowReturns& returns) {
    returns.z_loss = arrays_[0].As<float>();
    returns.log_probability = arrays_[1].As<float>();
    returns.entropy = arrays_[2].As<float>();
    returns.prediction = arrays_[3].As<int32_t>();
    returns.target_rank = arrays_[4].As<int32_t>();
    returns.top_k = top_k_;
    returns.top_tokens = arrays_[5].As<int32_t>();
    returns.top_log_probabilities = arrays_[6].As<float>();
    returns.divergence = arrays_[7].As<float>();
  }
  bool Untouched() const { return std::ranges::all_of(arrays_, &GuardedBytes::Untouched); }
  void CopyTo(StepResult& result) {
    for (const GuardedBytes& array : arrays_) result.intact = result.intact && array.Intact();
    Copy(0, tokens_, result.z_loss);
    Copy(1, tokens_, result.log_probability);
    Copy(2, tokens_, result.entropy);
    Copy(3, tokens_, result.prediction);
    Copy(4, tokens_, result.target_rank);
    Copy(5, tokens_ * top_k_, result.top_tokens);
    Copy(6, tokens_ * top_k_, result.top_log_probabilities);
    Copy(7, tokens_, result.divergence);
  }

 private:
  template <typename T>
  void Copy(size_t array, int64_t count, std::vector<T>& to) {
    const T* from = arrays_[array].As<T>();
    to.assign(from, from + count);
  }

  const int64_t tokens_;
  const int32_t top_k_;
  std::vector<GuardedBytes> arrays_;
};

}  // namespace

GuardedBytes::GuardedBytes(int64_t bytes, int64_t alignment, int64_t misalignment)
    : storage_(static_cast<size_t>(bytes + 2 * kGuardBytes + 2 * alignment), kGuardByte), size_(bytes) {
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage_.data())) + kGuardBytes;
  begin_ = kGuardBytes + (alignment - address % alignment) % alignment + misalignment;
}

bool GuardedBytes::Intact() const {
  const auto is_guard = [](unsigned char byte) { return byte == kGuardByte; };
  return std::all_of(storage_.begin(), storage_.begin() + begin_, is_guard) &&
         std::all_of(storage_.begin() + begin_ + size_, storage_.end(), is_guard);
}

Teacher TeacherProblem::Params() const {
  Teacher teacher;
  teacher.hidden = hidden;
  teacher.weight_type = type;
  teacher.weight = weight.data();
  if (!bias.empty()) teacher.bias = bias.data();
  teacher.logit_scale = logit_scale;
  teacher.softcap = softcap;
  teacher.hidden_type = type;
  teacher.hidden_states = hidden_states.data();
  return teacher;
}

LinearCrossEntropyParams Problem::Params() const {
  LinearCrossEntropyParams params;
  params.tokens = shape.tokens;
  params.vocab = shape.vocab;
  params.hidden = shape.hidden;
  params.weight_type = weight_type;
  params.weight = weight.data();
  params.hidden_type = hidden_type;
  params.hidden_states = hidden_states.data();
  params.labels = labels.data();
  params.gradient_scale = gradient_scale;
  params.z_gradient_scale = z_gradient_scale;
  params.options = options;
  if (!bias.empty()) params.bias = bias.data();
  if (!class_weights.empty()) params.class_weights = class_weights.data();
  if (!token_weights.empty()) params.token_weights = token_weights.data();
  if (!lse_gradients.empty()) params.lse_gradients = lse_gradients.data();
  if (!entropy_gradients.empty()) params.entropy_gradients = entropy_gradients.data();
  if (!kept_offsets.empty()) params.kept_tokens = {kept_offsets.data(), kept_tokens.data()};
  if (targets.has_value()) {
    params.target_lists = targets->Lists();
    params.distillation = targets->Weights();
  }
  return params;
}

void KeepTokens(Problem& problem, const std::vector<double>& shares, uint64_t seed) {
  std::mt19937_64 random(seed);
  problem.kept_offsets = {0};
  problem.kept_tokens.clear();
  int64_t ignored = 0;
  for (size_t row = 0; row < problem.labels.size(); ++row) {
    const int64_t label = problem.labels[row];
    std::bernoulli_distribution keeps(shares[row % shares.size()]);
    std::vector<int32_t> list;
    const bool is_ignored = label < 0;
    for (int32_t v = 0; v < problem.shape.vocab; ++v) {
      if (v == label || keeps(random)) list.push_back(v);
    }
    if (is_ignored && ignored++ % 2 == 0) list.clear();
    std::shuffle(list.begin(), list.end(), random);
    problem.kept_tokens.insert(problem.kept_tokens.end(), list.begin(), list.end());
    problem.kept_offsets.push_back(static_cast<int64_t>(problem.kept_tokens.size()));
  }
  problem.kept_tokens.reserve(1);  // a pointer to no lists is no null pointer
}

void KeepTokens(Problem& problem, double share, uint64_t seed) {
  KeepTokens(problem, std::vector<double>{share}, seed);
}

TargetProblem TargetProblem::Rows(int64_t first, int64_t count) const {
  TargetProblem rows{.weight = weight, .label_weight = label_weight};
  const auto begin = offsets.begin() + first;
  for (auto at = begin; at <= begin + count; ++at) rows.offsets.push_back(*at - *begin);
  rows.tokens.assign(tokens.begin() + *begin, tokens.begin() + *(begin + count));
  rows.probabilities.assign(probabilities.begin() + *begin, probabilities.begin() + *(begin + count));
  return rows;
}

TargetLists TargetProblem::Lists() const {
  static const int32_t no_token = 0;  // a pointer to no lists is no null pointer
  static const float no_probability = 0;
  return {{offsets.data(), tokens.empty() ? &no_token : tokens.data()},
          probabilities.empty() ? &no_probability : probabilities.data()};
}

Distillation TargetProblem::Weights() const { return {.weight = weight, .label_weight = label_weight}; }

TargetProblem RandomTargets(const Problem& problem, double share, double mass, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::bernoulli_distribution has(share);
  std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(problem.shape.vocab) - 1);
  std::exponential_distribution<double> weight;
  TargetProblem targets;
  targets.offsets = {0};
  int64_t ignored = 0;
  for (const int64_t label : problem.labels) {
    std::vector<int32_t> list;
    for (int32_t v = 0; v < problem.shape.vocab; ++v) {
      if (has(random)) list.push_back(v);
    }
    if (list.empty()) list.push_back(any(random));
    if (label < 0 && ignored++ % 2 == 0) list.clear();
    std::vector<double> parts(list.size());
    std::generate(parts.begin(), parts.end(), [&] { return weight(random); });
    const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
    for (const double part : parts) targets.probabilities.push_back(static_cast<float>(mass * part / sum));
    targets.tokens.insert(targets.tokens.end(), list.begin(), list.end());
    targets.offsets.push_back(static_cast<int64_t>(targets.tokens.size()));
  }
  return targets;
}

bool GuardedBytes::Untouched() const {
  return std::all_of(storage_.begin(), storage_.end(), [](unsigned char byte) { return byte == kGuardByte; });
}

std::vector<float> Problem::Weight() const {
  return Widened(weight_type, weight.data(), shape.vocab * shape.hidden);
}

std::vector<float> Problem::HiddenStates() const {
  const int64_t count = shape.tokens * shape.hidden;
  const std::vector<unsigned char> rounded =
      Narrowed(weight_type, Widened(hidden_type, hidden_states.data(), count));
  return Widened(weight_type, rounded.data(), count);
}

std::string Describe(const Shape& shape) {
  return std::to_string(shape.tokens) + "x" + std::to_string(shape.vocab) + "x" +
         std::to_string(shape.hidden);
}

void SetLogit(Problem& problem, int64_t row, int64_t entry, float value) {
  const int64_t hidden = problem.shape.hidden;
  std::vector<float> weight = problem.Weight();
  std::vector<float> x = problem.HiddenStates();
  for (int64_t v = 0; v < problem.shape.vocab; ++v) weight[v * hidden + hidden - 1 - row] = 0.0f;
  for (int64_t r = 0; r < problem.shape.tokens; ++r) x[r * hidden + hidden - 1 - row] = 0.0f;
  weight[entry * hidden + hidden - 1 - row] = value;
  x[row * hidden + hidden - 1 - row] = 1.0f;
  problem.weight = Narrowed(problem.weight_type, weight);
  problem.hidden_states = Narrowed(problem.hidden_type, x);
}

bool SameBits(const float* a, const float* b, int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && SameBits(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

std::vector<unsigned char> Narrowed(DataType type, const std::vector<float>& values) {
  std::vector<unsigned char> narrow(values.size() * static_cast<size_t>(SizeOf(type)));
  Convert(DataType::kFloat32, values.data(), type, narrow.data(), static_cast<int64_t>(values.size()));
  return narrow;
}

Problem RandomProblem(const ProblemOptions& options) {
  std::mt19937_64 random(options.seed);
  const Shape& shape = options.shape;
  Problem problem;
  problem.shape = shape;
  problem.weight_type = options.type;
  problem.hidden_type = options.type;
  const double deviation = options.logit_deviation / std::sqrt(static_cast<double>(shape.hidden));
  problem.weight = Narrowed(options.type, Normal(shape.vocab * shape.hidden, deviation, random));
  problem.hidden_states = Narrowed(options.type, Normal(shape.tokens * shape.hidden, 1.0, random));
  std::uniform_int_distribution<int64_t> label(0, shape.vocab - 1);
  problem.labels.resize(static_cast<size_t>(shape.tokens));
  for (int64_t& value : problem.labels) value = label(random);
  problem.gradient_scale = 1.0f / static_cast<float>(shape.tokens);
  return problem;
}

TeacherProblem RandomTeacher(const Shape& student, const TeacherOptions& options) {
  const Problem head = RandomProblem({.shape = {student.tokens, student.vocab, options.hidden},
                                      .type = options.type,
                                      .logit_deviation = options.logit_deviation,
                                      .seed = options.seed});
  TeacherProblem teacher;
  teacher.hidden = options.hidden;
  teacher.type = options.type;
  teacher.weight = head.weight;
  teacher.hidden_states = head.hidden_states;
  teacher.distillation = options.distillation;
  return teacher;
}

TeacherProblem Itself(const Problem& problem, const Distillation& distillation) {
  TeacherProblem teacher;
  teacher.hidden = problem.shape.hidden;
  teacher.type = problem.weight_type;
  teacher.weight = problem.weight;
  teacher.hidden_states = Narrowed(problem.weight_type, problem.HiddenStates());
  teacher.logit_scale = problem.options.logit_scale;
  teacher.softcap = problem.options.softcap;
  teacher.distillation = distillation;
  return teacher;
}

Problem ShardOf(const Problem& problem, const Shard& shard) {
  Problem part = problem;
  const auto cut = [&shard](auto& values, int64_t width) {
    if (values.empty()) return;
    values = {values.begin() + shard.first() * width, values.begin() + shard.end() * width};
  };
  part.shape.vocab = shard.end() - shard.first();
  cut(part.weight, problem.shape.hidden * SizeOf(problem.weight_type));
  cut(part.bias, 1);
  if (part.teacher.has_value()) {
    cut(part.teacher->weight, part.teacher->hidden * SizeOf(part.teacher->type));
    cut(part.teacher->bias, 1);
  }
  return part;
}

StepResult RunStep(const Problem& whole, const StepOptions& options) {
  const Problem& problem = options.shard == nullptr ? whole : ShardOf(whole, *options.shard);
  const auto [tokens, vocab, hidden] = problem.shape;
  LinearCrossEntropyParams params = problem.Params();
  Teacher teacher;
  if (problem.teacher.has_value()) {
    teacher = problem.teacher->Params();
    params.teacher = &teacher;
    params.distillation = problem.teacher->distillation;
  }
  const int64_t tile_rows = options.tile_rows == 0 ? tokens : options.tile_rows;
  // Nothing but the workspace is aligned to more than its element.
  GuardedBytes losses(tokens * 4, 64, 4);
  GuardedBytes log_sum_exp(tokens * 4, 64, 4);
  GuardedBytes dx(tokens * hidden * SizeOf(options.dx_type), 64, SizeOf(options.dx_type));
  GuardedBytes dw(vocab * hidden * 4, 64, 4);
  GuardedBytes db(static_cast<int64_t>(problem.bias.size()) * 4, 64, 4);
  const cpu::Arithmetic arithmetic = options.arithmetic.value_or(cpu::BestArithmetic(params.weight_type));
  const TeacherSize teacher_size{teacher.hidden, teacher.weight_type};
  const cpu::TileSize size{tile_rows, hidden, arithmetic, cpu::RowRecord::kFull,
                           problem.teacher.has_value() ? &teacher_size : nullptr};
  const cpu::Vocabulary vocabulary(options.shard, vocab);
  const int64_t workspace_bytes = cpu::WorkspaceBytes(size, vocabulary.shard());
  GuardedBytes workspace(workspace_bytes, 64);
  std::fill_n(losses.As<float>(), tokens, std::numeric_limits<float>::quiet_NaN());
  FillWith(options.initial_dw, dw);
  FillWith(options.initial_db, db);
  params.losses = losses.As<float>();
  params.returns.log_sum_exp = log_sum_exp.As<float>();
  params.dx_type = options.dx_type;
  if (options.input_gradient == StepOptions::InputGradient::kWrite) params.dx = dx.data();
  GuardedReturns returns(tokens, options.top_k.value_or(0));
  if (options.top_k.has_value()) returns.Attach(params.returns);
  params.weight_gradient = options.weight_gradient;
  params.dw = dw.As<float>();
  if (!problem.bias.empty()) params.db = db.As<float>();
  params.workspace = workspace.data();
  params.workspace_bytes = workspace.size();

  params.shard = options.shard;
  params.on_input_gradients = options.on_input_gradients;
  params.on_input_gradients_context = options.on_input_gradients_context;

  StepResult result;
  result.status = options.arithmetic ? cpu::RunLinearCrossEntropy(params, arithmetic, &result.stats)
                                     : CpuLinearCrossEntropy(params, &result.stats);
  const auto intact = [](const GuardedBytes* bytes) { return bytes->Intact(); };
  result.intact = std::ranges::all_of(
      std::initializer_list<const GuardedBytes*>{&losses, &log_sum_exp, &dx, &dw, &db, &workspace}, intact);
  if (options.shard != nullptr && !options.shard->answers()) {
    const auto is_nan = [](float loss) { return std::isnan(loss); };
    result.intact = result.intact && dx.Untouched() && log_sum_exp.Untouched() && returns.Untouched() &&
                    std::all_of(losses.As<float>(), losses.As<float>() + tokens, is_nan);
  }
  if (options.top_k.has_value()) returns.CopyTo(result);
  result.losses.assign(losses.As<float>(), losses.As<float>() + tokens);
  result.log_sum_exp.assign(log_sum_exp.As<float>(), log_sum_exp.As<float>() + tokens);
  result.dx = Widened(options.dx_type, dx.data(), tokens * hidden);
  result.dw.assign(dw.As<float>(), dw.As<float>() + vocab * hidden);
  result.db.assign(db.As<float>(), db.As<float>() + problem.bias.size());
  return result;
}

Reference RunReference(const Problem& problem) {
  const auto [tokens, vocab, hidden] = problem.shape;
  Reference reference;
  for (std::vector<double>* of_rows :
       {&reference.losses, &reference.log_sum_exp, &reference.z_loss, &reference.log_probability,
        &reference.entropy, &reference.divergence}) {
    of_rows->resize(static_cast<size_t>(tokens));
  }
  reference.logits.resize(static_cast<size_t>(tokens * vocab));
  reference.dx.resize(static_cast<size_t>(tokens * hidden));
  reference.dw.resize(static_cast<size_t>(vocab * hidden));
  reference.db.resize(static_cast<size_t>(vocab));
  // The oracle is slow and runs on one core: each core takes some rows, with gradients of its own.
  const int64_t parts = std::min(cpu::AvailableThreads(), tokens);
  std::vector<std::vector<double>> dw(static_cast<size_t>(parts), std::vector<double>(reference.dw.size()));
  std::vector<std::vector<double>> db(static_cast<size_t>(parts), std::vector<double>(reference.db.size()));
  std::vector<Status> statuses(static_cast<size_t>(parts));
  cpu::ParallelFor(parts, parts, [&, n = tokens, h = hidden, v = vocab](int64_t part, int64_t) {
    const int64_t first = n * part / parts;
    LinearCrossEntropyParams params = problem.Params();
    params.tokens = n * (part + 1) / parts - first;
    params.hidden_states =
        &problem.hidden_states[static_cast<size_t>(first * h * SizeOf(problem.hidden_type))];
    params.labels += first;
    if (params.token_weights != nullptr) params.token_weights += first;
    if (params.lse_gradients != nullptr) params.lse_gradients += first;
    if (params.entropy_gradients != nullptr) params.entropy_gradients += first;
    std::vector<int64_t> offsets;
    if (params.kept_tokens.given()) {
      const auto begin = problem.kept_offsets.begin() + first;
      for (auto at = begin; at <= begin + params.tokens; ++at) offsets.push_back(*at - *begin);
      params.kept_tokens = {offsets.data(), problem.kept_tokens.data() + *begin};
    }
    TargetProblem targets;
    if (problem.targets.has_value()) {
      targets = problem.targets->Rows(first, params.tokens);
      params.target_lists = targets.Lists();
    }
    Teacher teacher;
    if (problem.teacher.has_value()) {
      const TeacherProblem& own = *problem.teacher;
      teacher = own.Params();
      teacher.hidden_states = &own.hidden_states[static_cast<size_t>(first * own.hidden * SizeOf(own.type))];
      params.teacher = &teacher;
      params.distillation = own.distillation;
    }
    statuses[part] =
        ReferenceLinearCrossEntropy(params, {.losses = &reference.losses[first],
                                             .log_sum_exp = &reference.log_sum_exp[first],
                                             .z_loss = &reference.z_loss[first],
                                             .log_probability = &reference.log_probability[first],
                                             .entropy = &reference.entropy[first],
                                             .logits = &reference.logits[first * v],
                                             .dx = &reference.dx[first * h],
                                             .dw = dw[part].data(),
                                             .db = db[part].data(),
                                             .divergence = &reference.divergence[first]});
  });
  for (int64_t part = 0; part < parts; ++part) {
    if (statuses[part] != Status::kOk) return {};
    for (size_t i = 0; i < reference.dw.size(); ++i) reference.dw[i] += dw[part][i];
    for (size_t i = 0; i < reference.db.size(); ++i) reference.db[i] += db[part][i];
  }
  return reference;
}

double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    const double d = actual[i] - expected[i];
    difference += d * d;
    norm += expected[i] * expected[i];
  }
  return std::sqrt(norm > 0 ? difference / norm : difference);
}

}  // namespace lossd::kernels::testing
