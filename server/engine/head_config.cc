#include "server/engine/head_config.h"

#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

constexpr int64_t kMaxVocab = int64_t{1} << 30;  // numbers of tiles are 32 bits wide
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr size_t kMaxName = 128;

absl::Status Invalid(RejectReason reason, absl::string_view field, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, field, message);
}

bool IsName(absl::string_view name) {
  if (name.empty() || name.size() > kMaxName || !absl::ascii_isalnum(static_cast<unsigned char>(name[0]))) {
    return false;
  }
  for (const char c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') return false;
  }
  return true;
}

}  // namespace

bool HeadConfig::operator==(const HeadConfig& other) const {
  const auto properties = [](const HeadConfig& c) {
    return std::tie(c.name, c.vocab_size, c.hidden_size, c.weight_type, c.logit_scale, c.softcap,
                    c.weight_gradients);
  };
  const bool both = class_weights != nullptr && other.class_weights != nullptr;
  return properties(*this) == properties(other) &&
         (both ? *class_weights == *other.class_weights : class_weights == other.class_weights);
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
  return absl::OkStatus();
}

}  // namespace lossd::engine
