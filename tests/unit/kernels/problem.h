// A batch with everything a kernel test needs around it: inputs, guarded outputs, a guarded workspace.
#ifndef LOSSD_TESTS_UNIT_KERNELS_PROBLEM_H_
#define LOSSD_TESTS_UNIT_KERNELS_PROBLEM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cpu/arithmetic.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/shard.h"

namespace lossd::kernels::testing {

// Bytes with guard bands on both sides. `misaligned` places the content at an odd multiple of its element's
// alignment.
class GuardedBytes {
 public:
  GuardedBytes(int64_t bytes, int64_t alignment, int64_t misalignment = 0);

  void* data() { return storage_.data() + begin_; }
  const void* data() const { return storage_.data() + begin_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* As() {
    return static_cast<T*>(data());
  }
  // False if anything was written outside.
  bool Intact() const;
  // Whether nothing was written inside either.
  bool Untouched() const;

 private:
  std::vector<unsigned char> storage_;
  int64_t begin_ = 0;
  int64_t size_ = 0;
};

struct Shape {
  int64_t tokens = 1;
  int64_t vocab = 1;
  int64_t hidden = 1;
};

// "tokens x vocab x hidden", for messages.
std::string Describe(const Shape& shape);

// A head that soft targets are of, and what they are.
struct TeacherProblem {
  int64_t hidden = 1;
  DataType type = DataType::kFloat32;        // of weights and hidden states
  std::vector<unsigned char> weight;         // [V, its hidden]
  std::vector<unsigned char> hidden_states;  // [N, its hidden]
  std::vector<float> bias;                   // [V] or empty
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  Distillation distillation;

  Teacher Params() const;
};

// Soft targets on lists, one behind the other.
struct TargetProblem {
  std::vector<int64_t> offsets = {};  // [N + 1]
  std::vector<int32_t> tokens = {};
  std::vector<float> probabilities = {};
  float weight = 1.0f;
  float label_weight = 0.0f;

  // Those of rows [first, first + count).
  TargetProblem Rows(int64_t first, int64_t count) const;
  TargetLists Lists() const;
  Distillation Weights() const;
};

struct Problem {
  Shape shape;
  DataType weight_type = DataType::kFloat32;
  DataType hidden_type = DataType::kFloat32;
  std::vector<unsigned char> weight;         // [V, H] of weight_type
  std::vector<unsigned char> hidden_states;  // [N, H] of hidden_type
  std::vector<int64_t> labels;
  float gradient_scale = 1.0f;
  std::optional<float> z_gradient_scale;
  LossOptions options;
  std::vector<float> bias;               // [V] or empty
  std::vector<float> class_weights;      // [V] or empty
  std::vector<float> token_weights;      // [N] or empty
  std::vector<float> lse_gradients;      // [N] or empty
  std::vector<float> entropy_gradients;  // [N] or empty
  std::vector<int64_t> kept_offsets;     // [N + 1] or empty
  std::vector<int32_t> kept_tokens;
  std::optional<TargetProblem> targets;
  std::optional<TeacherProblem> teacher;

  // Without the teacher, which is TeacherProblem::Params().
  LinearCrossEntropyParams Params() const;
  std::vector<float> Weight() const;        // widened
  std::vector<float> HiddenStates() const;  // rounded to the weight's type, widened
};

// W normal with standard deviation logit_deviation / sqrt(hidden), X standard normal: logits of that
// deviation. Labels uniform.
struct ProblemOptions {
  Shape shape;
  DataType type = DataType::kFloat32;  // of weights and hidden states
  double logit_deviation = 1.0;
  uint64_t seed = 1;
};
Problem RandomProblem(const ProblemOptions& options);

// Gives each row a list of its label and about `share` of the other tokens, in any order; every other ignored
// row's is empty. `shares`: of one row after the other, over and over.
void KeepTokens(Problem& problem, double share, uint64_t seed = 1);
void KeepTokens(Problem& problem, const std::vector<double>& shares, uint64_t seed = 1);

// Gives each row a list of about `share` of the tokens, but one at least, with or without its label, and
// random probabilities that add up to `mass`; every other ignored row's is empty.
TargetProblem RandomTargets(const Problem& problem, double share, double mass, uint64_t seed = 1);

// The head that one rank has, with the same rows: labels and class weights stay those of all entries.
Problem ShardOf(const Problem& problem, const Shard& shard);

// A teacher as RandomProblem makes heads.
struct TeacherOptions {
  int64_t hidden = 1;
  DataType type = DataType::kFloat32;
  double logit_deviation = 1.0;
  uint64_t seed = 100;
  Distillation distillation = {};
};
TeacherProblem RandomTeacher(const Shape& student, const TeacherOptions& options);
// One that is the problem's own head with its own hidden states, options of the logits included.
TeacherProblem Itself(const Problem& problem, const Distillation& distillation);

// Makes the logit of vocabulary entry `entry` in row `row` about `value`, alone.
void SetLogit(Problem& problem, int64_t row, int64_t entry, float value);

bool SameBits(const float* a, const float* b, int64_t count);
bool SameBits(const std::vector<float>& a, const std::vector<float>& b);

// Rounds to `type`.
std::vector<unsigned char> Narrowed(DataType type, const std::vector<float>& values);

struct StepOptions {
  enum class InputGradient { kWrite, kNone };

  InputGradient input_gradient = InputGradient::kWrite;
  WeightGradient weight_gradient = WeightGradient::kOverwrite;
  DataType dx_type = DataType::kFloat32;
  std::optional<cpu::Arithmetic> arithmetic{};  // unset: CpuLinearCrossEntropy chooses
  int64_t tile_rows = 0;                        // 0: all rows at once
  std::vector<float> initial_dw{};              // empty: NaN everywhere
  std::vector<float> initial_db{};              // the same; of problems with a bias
  std::optional<int32_t> top_k{};               // set: every return is asked for, and so many tokens
  // Set: the step of this rank. `dw` and `db` are then its own entries', and what only the rank that answers
  // may write must not be touched elsewhere, or the result is not intact.
  const Shard* shard = nullptr;
  void (*on_input_gradients)(void* context) = nullptr;
  void* on_input_gradients_context = nullptr;
};

struct StepResult {
  Status status = Status::kOk;
  LinearCrossEntropyStats stats;
  bool intact = false;  // no guard band was touched, nor what is another rank's
  std::vector<float> losses;
  std::vector<float> log_sum_exp;
  std::vector<float> dx;  // widened
  std::vector<float> dw;
  std::vector<float> db;  // empty without a bias
  // These are there with StepOptions::top_k.
  std::vector<float> z_loss;
  std::vector<float> log_probability;
  std::vector<float> entropy;
  std::vector<float> divergence;
  std::vector<float> top_log_probabilities;
  std::vector<int32_t> prediction;
  std::vector<int32_t> target_rank;
  std::vector<int32_t> top_tokens;
};
StepResult RunStep(const Problem& problem, const StepOptions& options = {});

struct Reference {
  std::vector<double> losses;
  std::vector<double> log_sum_exp;
  std::vector<double> z_loss;
  std::vector<double> log_probability;
  std::vector<double> entropy;
  std::vector<double> divergence;
  std::vector<double> logits;  // [N, V], after scale and softcap; 0 of ignored rows
  std::vector<double> dx;
  std::vector<double> dw;
  std::vector<double> db;
};
Reference RunReference(const Problem& problem);

// ||actual - expected|| / ||expected|| (Frobenius); ||actual|| if expected is zero. NaN anywhere gives
// infinity.
double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_UNIT_KERNELS_PROBLEM_H_
