#include "server/engine/head/parts/logits_call.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/staging.h"

namespace lossd::engine {
namespace {

using kernels::DataType;
using kernels::SizeOf;

// The most bytes of one message with its header, as gRPC counts them.
constexpr int64_t kMostAnswerBytes = std::numeric_limits<int32_t>::max() - (int64_t{1} << 20);

int64_t HiddenRowBytes(const LogitsRequest& request, const HeadConfig& head) {
  return head.hidden_size * SizeOf(request.hidden_type);
}

int64_t AnswerRowBytes(const LogitsRequest& request, const HeadConfig& head) {
  if (request.top_k == 0) return head.vocab_size * SizeOf(request.logits_type);
  return int64_t{request.top_k} * (SizeOf(DataType::kFloat32) + static_cast<int64_t>(sizeof(int32_t))) +
         SizeOf(DataType::kFloat32);
}

absl::Status ValidateWanted(const LogitsRequest& request, const HeadConfig& head) {
  const int64_t most = std::min<int64_t>(kernels::kMostTopK, head.vocab_size);
  if (request.top_k < 0 || request.top_k > most) {
    return Invalid(RejectReason::kOption, "top_k",
                   absl::StrCat("top_k is ", request.top_k, "; it must be in [0, ", most, "]"));
  }
  if (request.top_k > 0 && request.logits_type != DataType::kFloat32) {
    return Invalid(RejectReason::kDtype, "logits_dtype",
                   absl::StrCat("logits_dtype is ", kernels::Name(request.logits_type),
                                "; with top_k logits are float32"));
  }
  if (request.logit_scale.has_value()) {
    if (absl::Status status = ValidateLogitScale(*request.logit_scale, "logit_scale"); !status.ok()) {
      return status;
    }
  }
  if (request.softcap.has_value()) {
    if (absl::Status status = ValidateSoftcap(*request.softcap, "softcap"); !status.ok()) return status;
  }
  if (request.bias == Bias::kUse && !head.bias) {
    return Invalid(RejectReason::kOption, "bias",
                   absl::StrCat("bias is true, but head ", head.name, " was created without a bias"));
  }
  return absl::OkStatus();
}

absl::Status ValidateRows(const LogitsRequest& request, const HeadConfig& head, const ChunkLimits& limits) {
  if (request.rows < 1) {
    return Invalid(RejectReason::kNoTokens, "rows",
                   absl::StrCat("rows is ", request.rows, "; it must be at least 1"));
  }
  const int64_t limit = MostLogitsBytes(limits);
  const int64_t hidden = HiddenRowBytes(request, head);
  const int64_t answer = AnswerRowBytes(request, head);
  const int64_t most_bytes = std::max<int64_t>(1, limit / std::max(hidden, answer));
  const int64_t most = std::min(most_bytes, limits.max_chunk_tokens);
  if (request.rows > most) {
    return Invalid(
        RejectReason::kChunkTooLarge, "rows",
        absl::StrCat("rows is ", request.rows, "; the most of one call is ", most, ": each has ", hidden,
                     " bytes of hidden states and ", answer, " of the answer, of which a call may have ",
                     limit, " (--max_chunk_bytes), and no more rows than ", limits.max_chunk_tokens,
                     " (--max_chunk_tokens); ask for the rows in several calls",
                     request.top_k == 0 && most < limits.max_chunk_tokens ? ", or for top_k" : ""));
  }
  if (answer > kMostAnswerBytes) {
    return Invalid(
        RejectReason::kChunkTooLarge, "logits_dtype",
        absl::StrCat("a row of ", head.vocab_size, " logits of ", kernels::Name(request.logits_type), " is ",
                     answer, " bytes, more than a message holds; ask for top_k"));
  }
  const int64_t bytes = request.rows * hidden;
  if (static_cast<int64_t>(request.hidden_states.size()) == bytes) return absl::OkStatus();
  return Invalid(
      RejectReason::kLength, "hidden_states",
      absl::StrCat("hidden_states holds ", request.hidden_states.size(), " bytes; [", request.rows, ", ",
                   head.hidden_size, "] of ", kernels::Name(request.hidden_type), " are ", bytes));
}

}  // namespace

int64_t MostLogitsBytes(const ChunkLimits& limits) { return limits.max_chunk_bytes; }

int64_t LogitsBytes(const LogitsRequest& request, const HeadConfig& head) {
  const int64_t hidden = head.hidden_size * std::max(SizeOf(request.hidden_type), SizeOf(head.weight_type));
  return request.rows * (hidden + AnswerRowBytes(request, head));
}

absl::Status ValidateLogits(const LogitsRequest& request, const HeadConfig& head, const ChunkLimits& limits) {
  if (absl::Status status = ValidateWanted(request, head); !status.ok()) return status;
  if (absl::Status status = ValidateRows(request, head, limits); !status.ok()) return status;
  const int64_t elements = request.rows * head.hidden_size;
  const int64_t bad = kernels::CountNonFinite(request.hidden_type, request.hidden_states.data(), elements);
  if (bad == 0) return absl::OkStatus();
  return Invalid(
      RejectReason::kNonFinite, "hidden_states",
      absl::StrCat("hidden_states holds ", bad, " non-finite values of ", elements, "; all must be finite"));
}

void MakeRoom(const LogitsRequest& request, const HeadConfig& head, LogitsAnswer* answer) {
  if (request.top_k == 0) {
    answer->logits = ResultBytes(request.rows * AnswerRowBytes(request, head));
    return;
  }
  const auto wanted = static_cast<size_t>(request.rows * request.top_k);
  answer->top_tokens.resize(wanted * sizeof(int32_t));
  answer->top_logits.resize(wanted * sizeof(float));
  answer->log_sum_exp.resize(static_cast<size_t>(request.rows) * sizeof(float));
}

LogitsTile::LogitsTile(const LogitsRequest& request, const HeadConfig& head, int64_t first, int64_t rows,
                       Device* device, LogitsAnswer* answer)
    : operand_(StagedResult(rows * head.hidden_size * SizeOf(head.weight_type), device)) {
  kernels::Convert(request.hidden_type, request.hidden_states.data() + first * HiddenRowBytes(request, head),
                   head.weight_type, operand_.data(), rows * head.hidden_size);
  rows_.rows = rows;
  rows_.hidden_states = operand_.data();
  rows_.logit_scale = request.logit_scale.value_or(head.logit_scale);
  rows_.softcap = request.softcap.value_or(head.softcap);
  rows_.bias = request.bias.value_or(head.bias ? Bias::kUse : Bias::kIgnore);
  kernels::LogitOutputs& out = rows_.outputs;
  out.type = request.logits_type;
  if (request.top_k == 0) {
    const int64_t row_bytes = AnswerRowBytes(request, head);
    logits_ = answer->logits.data() + first * row_bytes;
    if (rows * row_bytes >= kLeastStagedBytes) staged_ = device->RegisteredBytes(rows * row_bytes);
    out.logits = staged_.has_value() ? staged_->data() : logits_;
    return;
  }
  out.top_k = request.top_k;
  out.top_tokens = reinterpret_cast<int32_t*>(answer->top_tokens.data()) + first * request.top_k;
  out.top_logits = reinterpret_cast<float*>(answer->top_logits.data()) + first * request.top_k;
  out.log_sum_exp = reinterpret_cast<float*>(answer->log_sum_exp.data()) + first;
}

void LogitsTile::TakeResults() {
  if (staged_.has_value()) std::memcpy(logits_, staged_->data(), static_cast<size_t>(staged_->size()));
}

std::shared_ptr<const void> LogitsRoom::Take(int64_t bytes, int64_t limit) {
  int64_t before = *taken_;
  do {
    if (before > 0 && bytes > limit - before) return nullptr;
  } while (!taken_->compare_exchange_weak(before, before + bytes));
  // Outlives the head if an answer does.
  return {static_cast<const void*>(taken_.get()), [taken = taken_, bytes](const void*) { *taken -= bytes; }};
}

}  // namespace lossd::engine
