#include "server/engine/chunk/head_config.h"

#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr int64_t kMaxVocab = int64_t{1} << 30;  // numbers of tiles are 32 bits wide
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr size_t kMaxName = 128;
constexpr int64_t kMaxHeldBytes = int64_t{1} << 50;  // sums of memory stay numbers

absl::Status ValidateOption(bool right, absl::string_view field, double value, absl::string_view must) {
  if (right) return absl::OkStatus();
  return Invalid(RejectReason::kOption, field, absl::StrCat(field, " is ", value, "; it must be ", must));
}

// Arguments of other optimizers, which would be left out without a word.
absl::Status ValidateOptimizerKind(const OptimizerConfig& optimizer) {
  const OptimizerConfig defaults;
  const bool sgd = optimizer.kind == OptimizerKind::kSgd;
  const bool of_sgd = optimizer.momentum != 0 || optimizer.dampening != 0 || optimizer.nesterov;
  const bool of_adam =
      optimizer.beta1 != defaults.beta1 || optimizer.beta2 != defaults.beta2 || optimizer.eps != defaults.eps;
  if (!sgd && of_sgd) {
    return Invalid(RejectReason::kOption, "optimizer",
                   "optimizer has momentum, dampening or nesterov, which are arguments of SGD alone");
  }
  if (optimizer.kind == OptimizerKind::kAdam || optimizer.kind == OptimizerKind::kAdamW || !of_adam) {
    return absl::OkStatus();
  }
  return Invalid(RejectReason::kOption, "optimizer",
                 "optimizer has betas or eps, which are arguments of Adam and AdamW alone");
}

// The limits that torch.optim has, and that everything made of them is finite in fp32.
absl::Status ValidateOptimizer(const HeadConfig& head) {
  const OptimizerConfig& optimizer = head.optimizer;
  const auto at_least_0 = [](double value) { return value >= 0 && value <= OptimizerConfig::kMost; };
  const auto below_1 = [](double value) { return value >= 0 && value < 1; };
  absl::Status status = ValidateOption(at_least_0(optimizer.weight_decay), "optimizer.weight_decay",
                                       optimizer.weight_decay, "in [0, 1e18]");
  status.Update(ValidateOption(at_least_0(optimizer.momentum), "optimizer.momentum", optimizer.momentum,
                               "in [0, 1e18]"));
  status.Update(ValidateOption(std::abs(optimizer.dampening) <= OptimizerConfig::kMost, "optimizer.dampening",
                               optimizer.dampening, "in [-1e18, 1e18]"));
  status.Update(ValidateOption(below_1(optimizer.beta1), "optimizer.beta1", optimizer.beta1, "in [0, 1)"));
  status.Update(ValidateOption(below_1(optimizer.beta2), "optimizer.beta2", optimizer.beta2, "in [0, 1)"));
  status.Update(ValidateOption(at_least_0(optimizer.eps), "optimizer.eps", optimizer.eps, "in [0, 1e18]"));
  status.Update(ValidateOptimizerKind(optimizer));
  if (!status.ok()) return status;
  if (optimizer.nesterov && (optimizer.momentum == 0 || optimizer.dampening != 0)) {
    return Invalid(RejectReason::kOption, "optimizer.nesterov",
                   "optimizer.nesterov is true; it needs a momentum above 0 and a dampening of 0");
  }
  if (head.weight_gradients != WeightGradients::kFrozen) return absl::OkStatus();
  if (optimizer.kind == OptimizerKind::kNone && !head.double_buffer) return absl::OkStatus();
  return Invalid(RejectReason::kOption, "frozen",
                 "frozen is true; such a head has no gradient, so neither optimizer nor double_buffer");
}

absl::Status ValidateClassWeights(const std::vector<float>& weights, int64_t vocab_size) {
  if (static_cast<int64_t>(weights.size()) != vocab_size) {
    return Invalid(RejectReason::kLength, "class_weights",
                   absl::StrCat("class_weights holds ", weights.size(), " values; the head has ", vocab_size,
                                " entries"));
  }
  double sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0) {
      return Invalid(
          RejectReason::kOption, "class_weights",
          absl::StrCat("class_weights[", i, "] is ", weights[i], "; it must be finite and at least 0"));
    }
    sum += weights[i];
  }
  if (sum > 0 && sum <= std::numeric_limits<float>::max()) return absl::OkStatus();
  return Invalid(
      RejectReason::kOption, "class_weights",
      absl::StrCat("the sum of class_weights is ", sum, "; it must be above 0 and finite in fp32"));
}

}  // namespace

bool IsName(absl::string_view name) {
  if (name.empty() || name.size() > kMaxName || !absl::ascii_isalnum(static_cast<unsigned char>(name[0]))) {
    return false;
  }
  for (const char c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') return false;
  }
  return true;
}

int OptimizerConfig::moments() const {
  switch (kind) {
    case OptimizerKind::kNone:
      return 0;
    case OptimizerKind::kSgd:
      return momentum == 0 ? 0 : 1;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return 2;
  }
  return 0;
}

bool HeadConfig::operator==(const HeadConfig& other) const {
  const bool both = class_weights != nullptr && other.class_weights != nullptr;
  bool equal = both ? *class_weights == *other.class_weights : class_weights == other.class_weights;
  ForEachField(kHeadFields,
               [&](const auto& field) { equal = equal && this->*field.value == other.*field.value; });
  return equal;
}

namespace {

std::string Describe(const OptimizerConfig& optimizer) {
  const std::string decay =
      absl::StrCat("weight_decay ", optimizer.weight_decay, optimizer.maximize ? ", maximize" : "");
  const std::string betas = absl::StrCat("(betas ", optimizer.beta1, ", ", optimizer.beta2, ", eps ",
                                         optimizer.eps, ", ", decay, ")");
  switch (optimizer.kind) {
    case OptimizerKind::kNone:
      return "";
    case OptimizerKind::kSgd:
      return absl::StrCat(", SGD (momentum ", optimizer.momentum, ", dampening ", optimizer.dampening, ", ",
                          optimizer.nesterov ? "nesterov, " : "", decay, ")");
    case OptimizerKind::kAdam:
      return absl::StrCat(", Adam ", betas);
    case OptimizerKind::kAdamW:
      return absl::StrCat(", AdamW ", betas);
  }
  return "";
}

}  // namespace

std::string Describe(const HeadConfig& config) {
  std::string text =
      absl::StrCat("[", config.vocab_size, ", ", config.hidden_size, "] ", kernels::Name(config.weight_type));
  if (config.logit_scale != 1) absl::StrAppend(&text, ", logit_scale ", config.logit_scale);
  if (config.softcap != 0) absl::StrAppend(&text, ", softcap ", config.softcap);
  if (config.bias) absl::StrAppend(&text, ", with a bias");
  if (config.class_weights != nullptr) absl::StrAppend(&text, ", with class weights");
  if (config.weight_gradients == WeightGradients::kFrozen) absl::StrAppend(&text, ", frozen");
  absl::StrAppend(&text, Describe(config.optimizer));
  if (config.master_weights) absl::StrAppend(&text, ", master_weights");
  if (config.double_buffer) absl::StrAppend(&text, ", double_buffer");
  if (config.fixed_segments) absl::StrAppend(&text, ", fixed_segments");
  if (config.held_bytes > 0) absl::StrAppend(&text, ", held_bytes ", config.held_bytes);
  return text;
}

absl::Status Validate(const HeadConfig& config) {
  if (!IsName(config.name)) {
    return Invalid(RejectReason::kOption, "name",
                   "name must be 1 to 128 characters of [A-Za-z0-9._-] and start with a letter or a digit");
  }
  if (config.vocab_size < 1 || config.vocab_size > kMaxVocab) {
    return Invalid(RejectReason::kShape, "vocab_size",
                   absl::StrCat("vocab_size is ", config.vocab_size, "; it must be in [1, ", kMaxVocab, "]"));
  }
  if (config.hidden_size < 1 || config.hidden_size > kMaxHidden) {
    return Invalid(
        RejectReason::kShape, "hidden_size",
        absl::StrCat("hidden_size is ", config.hidden_size, "; it must be in [1, ", kMaxHidden, "]"));
  }
  if (absl::Status status = ValidateLogitScale(config.logit_scale, "logit_scale"); !status.ok()) {
    return status;
  }
  if (absl::Status status = ValidateSoftcap(config.softcap, "softcap"); !status.ok()) return status;
  if (config.master_weights && config.weight_type == kernels::DataType::kFloat32) {
    return Invalid(RejectReason::kOption, "master_weights",
                   "master_weights is true; fp32 weights are their own master");
  }
  if (config.held_bytes < 0 || config.held_bytes > kMaxHeldBytes) {
    return Invalid(
        RejectReason::kOption, "held_bytes",
        absl::StrCat("held_bytes is ", config.held_bytes, "; it must be in [0, ", kMaxHeldBytes, "]"));
  }
  if (absl::Status status = ValidateOptimizer(config); !status.ok()) return status;
  if (config.class_weights == nullptr) return absl::OkStatus();
  return ValidateClassWeights(*config.class_weights, config.vocab_size);
}

}  // namespace lossd::engine
