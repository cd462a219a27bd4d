#include "client/tools/perf/problem.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lossd::perf {
namespace {

// splitmix64 (Steele, Lea, Flood 2014): a stream of 64-bit words from any seed. Its states are one sequence:
// the seed is mixed first, so that neighbouring seeds start far apart in it.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) { state_ = Next(); }
  uint64_t Next() {
    uint64_t word = state_ += 0x9E3779B97F4A7C15;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return word ^ (word >> 31);
  }

 private:
  uint64_t state_;
};

// A sign, one of three exponents and seven bits of mantissa, from twelve random bits.
struct Parts {
  uint32_t sign;
  uint32_t halvings;
  uint32_t mantissa;
};
Parts PartsOf(uint64_t bits) {
  return {.sign = static_cast<uint32_t>(bits & 1),
          .halvings = 1 + static_cast<uint32_t>((bits >> 1 & 0xF) % 3),
          .mantissa = static_cast<uint32_t>(bits >> 5 & 0x7F)};
}
uint32_t Float32Bits(const Parts& parts, uint32_t exponent) {
  return parts.sign << 31 | (127 - exponent - parts.halvings) << 23 | parts.mantissa << 16;
}
uint16_t Float16Bits(const Parts& parts, uint32_t exponent) {
  return static_cast<uint16_t>(parts.sign << 15 | (15 - exponent - parts.halvings) << 10 |
                               parts.mantissa << 3);
}

template <typename Word, typename Encode>
void Fill(std::vector<std::byte>& bytes, Random random, const Encode& encode) {
  constexpr int kBits = 16;  // of each word, more than one value takes
  uint64_t word = 0;
  for (size_t at = 0, i = 0; at < bytes.size(); at += sizeof(Word), ++i) {
    word = i % 4 == 0 ? random.Next() : word >> kBits;
    const Word value = encode(PartsOf(word));
    std::memcpy(&bytes[at], &value, sizeof(value));
  }
}

double FromFloat16(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = bits >> 10 & 0x1F;
  const int mantissa = bits & 0x3FF;
  if (exponent == 0x1F) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(mantissa + 0x400, exponent - 25);
}

template <typename Word>
Word Load(const std::vector<std::byte>& bytes, int64_t index) {
  Word word;
  std::memcpy(&word, &bytes[static_cast<size_t>(index) * sizeof(Word)], sizeof(Word));
  return word;
}

absl::Status Wrong(const std::string& what) {
  return absl::DataLossError(absl::StrCat("wrong result: ", what));
}

struct Token {
  double loss = 0;
  std::vector<double> dx;
};

struct Logit {
  double value = 0;  // after scale and softcap
  double slope = 0;  // by the product x W
};
Logit LogitOf(const LossOptions& loss, double product) {
  const double scale = loss.logit_scale.value_or(1);
  const double cap = loss.softcap.value_or(0);
  if (cap == 0) return {scale * product, scale};
  const double tanh = std::tanh(scale * product / cap);
  return {cap * tanh, scale * (1 - tanh * tanh)};
}

// Sums over the vocabulary, of values and of rows of W.
struct VocabularySums {
  double exponentials = 0;
  double logits = 0;
  std::vector<double> weighted = {};  // e^s slope W
  std::vector<double> slopes = {};    // slope W
  double target = 0;
  std::vector<double> target_row = {};  // slope W
};

// The logits are far below 1: no maximum has to be taken off.
VocabularySums SumVocabulary(const Settings& settings, const Tensor& weights, const Inputs& inputs,
                             int64_t token) {
  const int64_t hidden = settings.hidden;
  std::vector<double> x(static_cast<size_t>(hidden));
  for (int64_t h = 0; h < hidden; ++h) {
    x[static_cast<size_t>(h)] = inputs.hidden_states.At(token * hidden + h);
  }
  VocabularySums sums{.weighted = std::vector<double>(x.size()), .slopes = std::vector<double>(x.size())};
  std::vector<double> row(x.size());
  for (int64_t v = 0; v < settings.vocab; ++v) {
    double product = 0;
    for (size_t h = 0; h < x.size(); ++h) {
      row[h] = weights.At(v * hidden + static_cast<int64_t>(h));
      product += row[h] * x[h];
    }
    const Logit logit = LogitOf(settings.loss, product);
    const double exponential = std::exp(logit.value);
    sums.exponentials += exponential;
    sums.logits += logit.value;
    for (size_t h = 0; h < x.size(); ++h) {
      row[h] *= logit.slope;
      sums.weighted[h] += exponential * row[h];
      sums.slopes[h] += row[h];
    }
    if (v != inputs.labels[static_cast<size_t>(token)]) continue;
    sums.target = logit.value;
    sums.target_row = row;
  }
  return sums;
}

// Loss and dX of one token as the definition has them (docs/numerics.md), in fp64.
Token ComputeToken(const Settings& settings, const Tensor& weights, const Inputs& inputs, int64_t token) {
  const VocabularySums sums = SumVocabulary(settings, weights, inputs, token);
  const double smoothing = settings.loss.label_smoothing;
  const double each = smoothing / static_cast<double>(settings.vocab);
  const double z_scale = settings.loss.lse_square_scale;
  const double log_sum_exp = std::log(sums.exponentials);
  Token result;
  result.loss = log_sum_exp - (1 - smoothing) * sums.target - each * sums.logits;
  result.loss += z_scale * log_sum_exp * log_sum_exp;
  const double alpha = 1 + 2 * z_scale * log_sum_exp;
  for (size_t h = 0; h < sums.weighted.size(); ++h) {
    result.dx.push_back(alpha * sums.weighted[h] / sums.exponentials - (1 - smoothing) * sums.target_row[h] -
                        each * sums.slopes[h]);
  }
  return result;
}

absl::Status CheckLosses(const Settings& settings, const Inputs& inputs, const Outputs& outputs,
                         Check& check) {
  double sum = 0;
  for (size_t i = 0; i < outputs.losses.size(); ++i) {
    const double loss = outputs.losses[i];
    if (!std::isfinite(loss)) return Wrong(absl::StrCat("the loss of token ", i, " is ", loss));
    if (inputs.labels[i] == kIgnored && loss != 0) {
      return Wrong(absl::StrCat("token ", i, " is ignored but has the loss ", loss));
    }
    sum += loss;
  }
  if (inputs.valid_tokens == 0) return absl::OkStatus();
  // Logits have a standard deviation of at most 0.3 times their scale: half its square is what their mean
  // loss is above log V, and five of it are more than chance does. The z-loss is of about log V too.
  const auto valid = static_cast<double>(inputs.valid_tokens);
  check.mean_loss = sum / valid;
  const double spread = std::max(1.0F, settings.loss.logit_scale.value_or(1));
  const double per_unit = 1 + 2 * settings.loss.lse_square_scale * (check.log_vocab + 1);
  const double expected =
      check.log_vocab + settings.loss.lse_square_scale * check.log_vocab * check.log_vocab;
  if (std::abs(check.mean_loss - expected) > per_unit * spread * spread * (0.1 + 1.5 / std::sqrt(valid))) {
    return Wrong(absl::StrCat("the mean loss is ", check.mean_loss, "; with such weights it is about ",
                              expected, ", log V being ", check.log_vocab));
  }
  return absl::OkStatus();
}

absl::Status CheckDx(const Settings& settings, const Inputs& inputs, const Outputs& outputs) {
  for (int64_t token = 0; token < settings.tokens; ++token) {
    const bool ignored = inputs.labels[static_cast<size_t>(token)] == kIgnored;
    bool zero = true;
    for (int64_t h = 0; h < settings.hidden; ++h) {
      const double value = outputs.dx.At(token * settings.hidden + h);
      if (!std::isfinite(value)) return Wrong(absl::StrCat("dX of token ", token, " is not finite"));
      zero = zero && value == 0;
    }
    if (zero != ignored) {
      return Wrong(
          absl::StrCat("token ", token, ignored ? " is ignored but has a dX" : " has a dX of zeros"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Region>> NewRegion(Client& client, const Settings& settings, int64_t bytes) {
  if (settings.transport != Transport::kShm && settings.transport != Transport::kCudaIpc) return std::nullopt;
  const bool system = settings.transport == Transport::kShm;
  auto region = client.CreateRegion(system ? RegionKind::kSystem : RegionKind::kDevice, bytes);
  if (!region.ok()) return region.status();
  return *std::move(region);
}

}  // namespace

double Tensor::At(int64_t index) const {
  switch (type_) {
    case DataType::kBFloat16:
      return std::bit_cast<float>(static_cast<uint32_t>(Load<uint16_t>(bytes_, index)) << 16);
    case DataType::kFloat16:
      return FromFloat16(Load<uint16_t>(bytes_, index));
    case DataType::kFloat32:
      break;
  }
  return Load<float>(bytes_, index);
}

void Tensor::FillRandom(int exponent, uint64_t seed) {
  const auto shift = static_cast<uint32_t>(exponent);
  switch (type_) {
    case DataType::kFloat32:
      Fill<uint32_t>(bytes_, Random(seed), [shift](const Parts& parts) { return Float32Bits(parts, shift); });
      return;
    case DataType::kBFloat16:
      Fill<uint16_t>(bytes_, Random(seed), [shift](const Parts& parts) {
        return static_cast<uint16_t>(Float32Bits(parts, shift) >> 16);
      });
      return;
    case DataType::kFloat16:
      Fill<uint16_t>(bytes_, Random(seed), [shift](const Parts& parts) { return Float16Bits(parts, shift); });
      return;
  }
}

Tensor RandomWeights(const Settings& settings) {
  Tensor weights(settings.weight_type, settings.vocab * settings.hidden);
  // Sums of H products get a standard deviation of an eighth to a quarter; fp16's smallest exponent is never
  // reached.
  const int root = static_cast<int>(std::ceil(std::log2(static_cast<double>(settings.hidden)) / 2));
  weights.FillRandom(std::min(root, 11), ~settings.seed);  // never that of a batch
  return weights;
}

Inputs::Inputs(const Settings& settings, uint64_t seed)
    : hidden_states(settings.hidden_type, settings.tokens * settings.hidden),
      labels(static_cast<size_t>(settings.tokens)) {
  hidden_states.FillRandom(0, seed);
  Random random(seed ^ 0x6C6162656C73);  // not the hidden states' own
  const auto ignored = static_cast<uint64_t>(settings.ignored * 0x1p32);
  for (int64_t& label : labels) {
    const bool ignore = random.Next() >> 32 < ignored;
    label = ignore ? kIgnored : static_cast<int64_t>(random.Next() % static_cast<uint64_t>(settings.vocab));
    if (!ignore) ++valid_tokens;
  }
}

Outputs::Outputs(const Settings& settings)
    : losses(static_cast<size_t>(settings.tokens)),
      dx(settings.dx_type, settings.mode == ComputeMode::kLossOnly ? 0 : settings.tokens * settings.hidden) {}

absl::Status Share(Client& client, const Settings& settings, Inputs& inputs) {
  auto region = NewRegion(client, settings, inputs.hidden_states.bytes());
  if (!region.ok()) return region.status();
  inputs.region = *std::move(region);
  if (!inputs.region) return absl::OkStatus();
  return inputs.region->CopyIn(0, inputs.hidden_states.data(), inputs.hidden_states.bytes());
}

absl::Status Share(Client& client, const Settings& settings, Outputs& outputs) {
  if (outputs.dx.size() == 0) return absl::OkStatus();
  auto region = NewRegion(client, settings, outputs.dx.bytes());
  if (!region.ok()) return region.status();
  outputs.region = *std::move(region);
  return absl::OkStatus();
}

absl::Status Fetch(Outputs& outputs) {
  if (!outputs.region) return absl::OkStatus();
  return outputs.region->CopyOut(0, outputs.dx.data(), outputs.dx.bytes());
}

absl::StatusOr<BatchResult> Compute(Session& session, const Settings& settings, const Inputs& inputs,
                                    Outputs& outputs) {
  void* dx = outputs.dx.size() == 0 ? nullptr : outputs.dx.data();
  if (outputs.region) dx = outputs.region->data();
  return session.Compute(
      {.labels = inputs.labels,
       .hidden_type = settings.hidden_type,
       .hidden_states = inputs.region ? inputs.region->data() : inputs.hidden_states.data(),
       .mode = settings.mode,
       .ignore_index = kIgnored,
       .loss = settings.loss},
      {.losses = outputs.losses, .dx_type = settings.dx_type, .dx = dx});
}

absl::StatusOr<Check> CheckAnswer(const Settings& settings, const Tensor& weights, const Inputs& inputs,
                                  const Outputs& outputs) {
  Check check{.log_vocab = std::log(static_cast<double>(settings.vocab))};
  if (absl::Status status = CheckLosses(settings, inputs, outputs, check); !status.ok()) return status;
  const bool has_dx = outputs.dx.size() != 0;
  // A vocabulary of one has no gradient.
  if (has_dx && settings.vocab > 1) {
    if (absl::Status status = CheckDx(settings, inputs, outputs); !status.ok()) return status;
  }
  const auto valid =
      std::find_if(inputs.labels.begin(), inputs.labels.end(), [](int64_t label) { return label >= 0; });
  if (valid == inputs.labels.end()) return check;
  const int64_t token = valid - inputs.labels.begin();
  const Token expected = ComputeToken(settings, weights, inputs, token);
  check.loss_error = std::abs(outputs.losses[static_cast<size_t>(token)] - expected.loss);
  double difference = 0;
  double norm = 0;
  for (int64_t h = 0; has_dx && h < settings.hidden; ++h) {
    const double value = expected.dx[static_cast<size_t>(h)];
    difference += std::pow(outputs.dx.At(token * settings.hidden + h) - value, 2);
    norm += value * value;
  }
  check.dx_error = norm > 0 ? std::sqrt(difference / norm) : 0;
  constexpr double kLossTolerance = 0.02;
  constexpr double kDxTolerance = 0.02;
  if (check.loss_error <= kLossTolerance && check.dx_error <= kDxTolerance) return check;
  return Wrong(absl::StrCat("token ", token, " has the loss ", outputs.losses[static_cast<size_t>(token)],
                            ", it should be ", expected.loss, "; its dX is off by ", check.dx_error,
                            " of its norm"));
}

}  // namespace lossd::perf
