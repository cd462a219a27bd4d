#include "server/engine/chunk.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

absl::Status Invalid(RejectReason reason, absl::string_view field, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, field, message);
}

absl::Status ValidateSizes(const Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits) {
  if (chunk.tokens < 1) {
    return Invalid(RejectReason::kNoTokens, "tokens",
                   absl::StrCat("tokens is ", chunk.tokens, "; it must be at least 1"));
  }
  if (chunk.tokens > limits.max_chunk_tokens) {
    return Invalid(RejectReason::kChunkTooLarge, "tokens",
                   absl::StrCat("tokens is ", chunk.tokens, "; the limit is ", limits.max_chunk_tokens));
  }
  // tokens <= 65536-like limits and hidden_size <= 2^20, so this cannot overflow.
  const int64_t hidden_bytes = chunk.tokens * head.hidden_size * kernels::SizeOf(chunk.hidden_type);
  if (hidden_bytes > limits.max_chunk_bytes) {
    return Invalid(RejectReason::kChunkTooLarge, "hidden_states",
                   absl::StrCat("hidden_states of ", chunk.tokens, " tokens are ", hidden_bytes,
                                " bytes; the limit of a chunk is ", limits.max_chunk_bytes));
  }
  if (static_cast<int64_t>(chunk.labels.size()) != chunk.tokens * 8) {
    return Invalid(RejectReason::kLength, "labels",
                   absl::StrCat("labels holds ", chunk.labels.size(), " bytes; ", chunk.tokens,
                                " int64 labels are ", chunk.tokens * 8));
  }
  if (static_cast<int64_t>(chunk.hidden_states.size()) != hidden_bytes) {
    return Invalid(
        RejectReason::kLength, "hidden_states",
        absl::StrCat("hidden_states holds ", chunk.hidden_states.size(), " bytes; [", chunk.tokens, ", ",
                     head.hidden_size, "] of ", kernels::Name(chunk.hidden_type), " are ", hidden_bytes));
  }
  return absl::OkStatus();
}

int64_t LabelAt(const Chunk& chunk, int64_t row) {
  int64_t label = 0;
  std::memcpy(&label, chunk.labels.data() + row * 8, sizeof(label));
  return label;
}

absl::Status ValidateLabels(const Chunk& chunk, const HeadConfig& head) {
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    const int64_t label = LabelAt(chunk, row);
    if (label != chunk.ignore_index && (label < 0 || label >= head.vocab_size)) {
      return Invalid(RejectReason::kLabel, "labels",
                     absl::StrCat("labels[", row, "] is ", label, "; it must be in [0, ", head.vocab_size,
                                  ") or ignore_index ", chunk.ignore_index));
    }
  }
  return absl::OkStatus();
}

// Rows that are ignored may hold anything: padding often does.
absl::Status ValidateFinite(const Chunk& chunk, const HeadConfig& head) {
  const int64_t row_bytes = head.hidden_size * kernels::SizeOf(chunk.hidden_type);
  int64_t bad = 0;
  for (int64_t row = 0; row < chunk.tokens;) {
    if (LabelAt(chunk, row) == chunk.ignore_index) {
      ++row;
      continue;
    }
    int64_t end = row + 1;
    while (end < chunk.tokens && LabelAt(chunk, end) != chunk.ignore_index) ++end;
    bad += kernels::CountNonFinite(chunk.hidden_type, chunk.hidden_states.data() + row * row_bytes,
                                   (end - row) * head.hidden_size);
    row = end;
  }
  if (bad == 0) return absl::OkStatus();
  return Invalid(RejectReason::kNonFinite, "hidden_states",
                 absl::StrCat("hidden_states holds ", bad, " non-finite values of ",
                              chunk.tokens * head.hidden_size, "; all must be finite"));
}

}  // namespace

absl::Status ValidateContent(const Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits) {
  if (!chunk.decode_status.ok()) return chunk.decode_status;
  if (absl::Status status = ValidateSizes(chunk, head, limits); !status.ok()) return status;
  if (!std::isfinite(chunk.gradient_scale)) {
    return Invalid(RejectReason::kOption, "gradient_scale",
                   absl::StrCat("gradient_scale is ", chunk.gradient_scale, "; it must be finite"));
  }
  if (absl::Status status = ValidateLabels(chunk, head); !status.ok()) return status;
  return ValidateFinite(chunk, head);
}

int64_t AnswerBytes(const Chunk& chunk, int64_t hidden_size) {
  if (chunk.mode == ComputeMode::kLossOnly) return chunk.tokens * 4;
  return chunk.tokens * (4 + hidden_size * kernels::SizeOf(chunk.dx_type));
}

}  // namespace lossd::engine
