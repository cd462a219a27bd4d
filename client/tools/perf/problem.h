// Random weights, hidden states and labels, and what the server's answers to them have to be.
#ifndef LOSSD_CLIENT_TOOLS_PERF_PROBLEM_H_
#define LOSSD_CLIENT_TOOLS_PERF_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/tools/perf/settings.h"
#include "lossd/client.h"

namespace lossd::perf {

inline constexpr int64_t kIgnored = -100;

// Elements of one type, dense.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DataType type, int64_t elements)
      : type_(type), bytes_(static_cast<size_t>(elements) * static_cast<size_t>(SizeOf(type))) {}

  DataType type() const { return type_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  int64_t size() const { return bytes() / SizeOf(type_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_.size()); }
  double At(int64_t index) const;

  // Values of either sign and size 2^-exponent/8 to 2^-exponent, which every type holds exactly: the same
  // seed gives the same values in each.
  void FillRandom(int exponent, uint64_t seed);

 private:
  DataType type_ = DataType::kFloat32;
  std::vector<std::byte> bytes_;
};

// [V, H], so small that logits of hidden states of Inputs stay far below 1: losses are close to log V.
Tensor RandomWeights(const Settings& settings);

// One batch.
struct Inputs {
  Inputs(const Settings& settings, uint64_t seed);
  Tensor hidden_states;  // [N, H]
  std::vector<int64_t> labels;
  int64_t valid_tokens = 0;
  std::optional<Region> region = {};  // with a copy of hidden_states, which is what the server reads
};

struct Outputs {
  explicit Outputs(const Settings& settings);
  std::vector<float> losses;
  Tensor dx;                          // empty of ComputeMode::kLossOnly
  std::optional<Region> region = {};  // where the server writes dX
};

// Gives them regions, if the transport has such. The client outlives them.
absl::Status Share(Client& client, const Settings& settings, Inputs& inputs);
absl::Status Share(Client& client, const Settings& settings, Outputs& outputs);
// What the server wrote into the region, if there is one, into `dx`.
absl::Status Fetch(Outputs& outputs);

absl::StatusOr<BatchResult> Compute(Session& session, const Settings& settings, const Inputs& inputs,
                                    Outputs& outputs);

struct Check {
  double mean_loss = 0;
  double log_vocab = 0;
  double loss_error = 0;  // of the token that was computed here too, in fp64
  double dx_error = 0;    // of its row of dX, relative
};
// Losses finite and about log V, no loss and no dX for ignored tokens, dX finite, and one token's loss and dX
// as computed here; DATA_LOSS says what is wrong.
absl::StatusOr<Check> CheckAnswer(const Settings& settings, const Tensor& weights, const Inputs& inputs,
                                  const Outputs& outputs);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_PROBLEM_H_
