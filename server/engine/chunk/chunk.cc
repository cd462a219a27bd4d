#include "server/engine/chunk/chunk.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

// tokens <= 65536-like limits and hidden_size <= 2^20, so this cannot overflow.
int64_t HiddenBytes(const Chunk& chunk, const HeadConfig& head) {
  return chunk.tokens * head.hidden_size * kernels::SizeOf(chunk.hidden_type);
}

// The hidden states of one head among a chunk's.
struct HiddenTensor {
  absl::string_view field;
  const Payload& payload;
  int64_t hidden_size = 0;
  kernels::DataType type = kernels::DataType::kFloat32;

  int64_t BytesOf(int64_t tokens) const { return tokens * hidden_size * kernels::SizeOf(type); }
};

HiddenTensor OwnTensor(const Chunk& chunk, const HeadConfig& head) {
  return {"hidden_states", chunk.hidden_states, head.hidden_size, chunk.hidden_type};
}

HiddenTensor TeacherTensor(const Chunk& chunk, const HeadConfig& teacher) {
  return {"teacher_hidden_states", chunk.teacher_hidden, teacher.hidden_size,
          chunk.options.distillation->hidden_type};
}

absl::Status ValidateLength(const HiddenTensor& tensor, int64_t tokens) {
  const int64_t bytes = tensor.BytesOf(tokens);
  if (tensor.payload.size() == bytes) return absl::OkStatus();
  return Invalid(RejectReason::kLength, tensor.field,
                 absl::StrCat(tensor.field, " holds ", tensor.payload.size(), " bytes; [", tokens, ", ",
                              tensor.hidden_size, "] of ", kernels::Name(tensor.type), " are ", bytes));
}

absl::Status ValidateLengths(const Chunk& chunk, const HeadConfig& head, const HeadConfig* teacher) {
  if (absl::Status status = ValidateLabelBytes(chunk); !status.ok()) return status;
  if (absl::Status status = ValidateLength(OwnTensor(chunk, head), chunk.tokens); !status.ok()) return status;
  if (teacher != nullptr) return ValidateLength(TeacherTensor(chunk, *teacher), chunk.tokens);
  if (chunk.teacher_hidden.size() == 0) return absl::OkStatus();
  return Invalid(RejectReason::kLength, "teacher_hidden_states",
                 absl::StrCat("teacher_hidden_states holds ", chunk.teacher_hidden.size(),
                              " bytes, but options.distillation is not set"));
}

int64_t LabelAt(const std::string& labels, int64_t row) {
  int64_t label = 0;
  std::memcpy(&label, labels.data() + row * 8, sizeof(label));
  return label;
}

absl::Status ValidateGradientScale(const Chunk& chunk) {
  if (std::isfinite(chunk.gradient_scale)) return absl::OkStatus();
  return Invalid(RejectReason::kOption, "gradient_scale",
                 absl::StrCat("gradient_scale is ", chunk.gradient_scale, "; it must be finite"));
}

absl::Status ValidateLabels(const Chunk& chunk, const HeadConfig& head) {
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    const int64_t label = LabelAt(chunk.labels, row);
    if (label != chunk.ignore_index && (label < 0 || label >= head.vocab_size)) {
      return Invalid(RejectReason::kLabel, "labels",
                     absl::StrCat("labels[", row, "] is ", label, "; it must be in [0, ", head.vocab_size,
                                  ") or ignore_index ", chunk.ignore_index));
    }
  }
  return absl::OkStatus();
}

// Counts through a payload whose parts may end in the middle of an element.
class NonFiniteCounter {
 public:
  NonFiniteCounter(const Payload& payload, kernels::DataType type)
      : reader_(payload), type_(type), element_bytes_(kernels::SizeOf(type)) {}

  void Skip(int64_t bytes) {
    while (bytes > 0) bytes -= static_cast<int64_t>(reader_.Next(bytes).size());
  }
  // In the next `bytes`, which are whole elements.
  int64_t Count(int64_t bytes) {
    int64_t bad = 0;
    while (bytes > 0) {
      ByteSpan next = reader_.Next(torn_bytes_ > 0 ? element_bytes_ - torn_bytes_ : bytes);
      bytes -= static_cast<int64_t>(next.size());
      const int64_t whole = torn_bytes_ > 0 ? 0 : static_cast<int64_t>(next.size()) / element_bytes_;
      bad += kernels::CountNonFinite(type_, next.data(), whole);
      next = next.subspan(static_cast<size_t>(whole * element_bytes_));
      if (next.empty()) continue;
      std::memcpy(torn_.data() + torn_bytes_, next.data(), next.size());
      torn_bytes_ += static_cast<int64_t>(next.size());
      if (torn_bytes_ < element_bytes_) continue;
      bad += kernels::CountNonFinite(type_, torn_.data(), 1);
      torn_bytes_ = 0;
    }
    return bad;
  }

 private:
  PayloadReader reader_;
  const kernels::DataType type_;
  const int64_t element_bytes_;
  std::array<std::byte, 8> torn_ = {};  // the beginning of an element
  int64_t torn_bytes_ = 0;
};

absl::Status ValidateFinite(const Chunk& chunk, const HiddenTensor& tensor) {
  if (tensor.payload.place() == MemoryPlace::kDevice) return absl::OkStatus();
  const int64_t bad =
      tensor.payload.place() == MemoryPlace::kRank
          ? tensor.payload.at_rank().non_finite
          : CountNonFinite(tensor.payload, tensor.type, chunk.tokens, chunk.labels, chunk.ignore_index);
  if (bad == 0) return absl::OkStatus();
  return Invalid(RejectReason::kNonFinite, tensor.field,
                 absl::StrCat(tensor.field, " holds ", bad, " non-finite values of ",
                              chunk.tokens * tensor.hidden_size, "; all must be finite"));
}

absl::Status ValidateHold(const Chunk& chunk) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
  if (chunk.hold.first < 0 || chunk.hold.first > kMost) {
    return Invalid(
        RejectReason::kOption, "hold.first_token",
        absl::StrCat("hold.first_token is ", chunk.hold.first, "; it must be in [0, ", kMost, "]"));
  }
  if (!chunk.holds_hidden || chunk.hold.number != 0) return absl::OkStatus();
  return Invalid(RejectReason::kOption, "hold.number",
                 "hold.number is 0, which is no batch's; hold.hidden_states needs the batch's number");
}

}  // namespace

void PlaceAtRank(const HeldTensors& held, const std::shared_ptr<const void>& owner, Chunk* chunk) {
  const RankMemory memory{held.rank, held.number, held.non_finite};
  chunk->hidden_states = Payload::At(memory, held.hidden_bytes, owner);
  if (held.teacher_bytes > 0) {
    const RankMemory of_teacher{held.rank, held.number, held.teacher_non_finite};
    chunk->teacher_hidden = Payload::At(of_teacher, held.teacher_bytes, owner);
  }
  chunk->dx = {nullptr, MemoryPlace::kRank, owner};
}

// Rows that are ignored may hold anything: padding often does.
int64_t CountNonFinite(const Payload& hidden_states, kernels::DataType type, int64_t tokens,
                       const std::string& labels, int64_t ignore_index) {
  const bool fits = tokens > 0 && hidden_states.size() % tokens == 0 &&
                    static_cast<uint64_t>(tokens) == labels.size() / sizeof(int64_t);
  const int64_t row_bytes = fits ? hidden_states.size() / tokens : 0;
  if (row_bytes % kernels::SizeOf(type) != 0) return 0;
  NonFiniteCounter counter(hidden_states, type);
  int64_t bad = 0;
  for (int64_t row = 0; fits && row < tokens;) {
    const bool ignored = LabelAt(labels, row) == ignore_index;
    int64_t end = row + 1;
    while (end < tokens && (LabelAt(labels, end) == ignore_index) == ignored) ++end;
    if (ignored) {
      counter.Skip((end - row) * row_bytes);
    } else {
      bad += counter.Count((end - row) * row_bytes);
    }
    row = end;
  }
  return bad;
}

bool TakesHeld(const Chunk& chunk) {
  return chunk.holds_hidden && HasWeightGradient(chunk.mode) && chunk.hidden_states.size() == 0 &&
         !chunk.hidden_region.has_value();
}

absl::Status ValidateLabelBytes(const Chunk& chunk) {
  if (static_cast<int64_t>(chunk.labels.size()) == chunk.tokens * 8) return absl::OkStatus();
  return Invalid(RejectReason::kLength, "labels",
                 absl::StrCat("labels holds ", chunk.labels.size(), " bytes; ", chunk.tokens,
                              " int64 labels are ", chunk.tokens * 8));
}

absl::Status ValidateTokens(const Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits,
                            const HeadConfig* teacher) {
  if (chunk.tokens < 1) {
    return Invalid(RejectReason::kNoTokens, "tokens",
                   absl::StrCat("tokens is ", chunk.tokens, "; it must be at least 1"));
  }
  if (chunk.tokens > limits.max_chunk_tokens) {
    return Invalid(RejectReason::kChunkTooLarge, "tokens",
                   absl::StrCat("tokens is ", chunk.tokens, "; the limit is ", limits.max_chunk_tokens));
  }
  const int64_t hidden_bytes = HiddenBytes(chunk, head);
  if (hidden_bytes > limits.max_chunk_bytes) {
    return Invalid(RejectReason::kChunkTooLarge, "hidden_states",
                   absl::StrCat("hidden_states of ", chunk.tokens, " tokens are ", hidden_bytes,
                                " bytes; the limit of a chunk is ", limits.max_chunk_bytes));
  }
  const int64_t teacher_bytes = teacher == nullptr ? 0 : TeacherTensor(chunk, *teacher).BytesOf(chunk.tokens);
  if (hidden_bytes + teacher_bytes > limits.max_chunk_bytes) {
    return Invalid(RejectReason::kChunkTooLarge, "teacher_hidden_states",
                   absl::StrCat("hidden_states of ", chunk.tokens, " tokens are ", hidden_bytes,
                                " bytes and teacher_hidden_states ", teacher_bytes,
                                "; the limit of a chunk is ", limits.max_chunk_bytes, " for both"));
  }
  return absl::OkStatus();
}

absl::Status ValidateContent(const Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits,
                             const HeadConfig* teacher) {
  if (!chunk.decode_status.ok()) return chunk.decode_status;
  if (absl::Status status = ValidateTokens(chunk, head, limits, teacher); !status.ok()) return status;
  if (absl::Status status = ValidateHold(chunk); !status.ok()) return status;
  if (absl::Status status = ValidateLengths(chunk, head, teacher); !status.ok()) return status;
  if (absl::Status status = ValidateOptions(chunk, head); !status.ok()) return status;
  if (teacher != nullptr) {
    if (absl::Status status = ValidateTeacher(*teacher, head); !status.ok()) return status;
  }
  if (absl::Status status = ValidateGradientScale(chunk); !status.ok()) return status;
  if (absl::Status status = ValidateLabels(chunk, head); !status.ok()) return status;
  if (absl::Status status = ValidateLists(chunk, head); !status.ok()) return status;
  if (absl::Status status = ValidateFinite(chunk, OwnTensor(chunk, head)); !status.ok()) return status;
  return teacher == nullptr ? absl::OkStatus() : ValidateFinite(chunk, TeacherTensor(chunk, *teacher));
}

absl::Status ValidateKept(const Chunk& chunk, const HeadConfig& head) {
  if (absl::Status status = ValidateLengths(chunk, head, nullptr); !status.ok()) return status;
  if (absl::Status status = ValidateOptions(chunk, head); !status.ok()) return status;
  if (absl::Status status = ValidateGradientScale(chunk); !status.ok()) return status;
  if (absl::Status status = ValidateLabels(chunk, head); !status.ok()) return status;
  return ValidateLists(chunk, head);
}

int64_t TokenReturns::bytes() const {
  return static_cast<int64_t>(log_sum_exp.size() + z_losses.size() + log_probabilities.size() +
                              entropies.size() + predictions.size() + target_ranks.size() +
                              divergences.size() + top_tokens.size() + top_log_probabilities.size());
}

int64_t AnswerBytes(const Chunk& chunk, int64_t hidden_size) {
  const int64_t token_bytes = 4 + ReturnBytes(ReturnsOf(chunk));
  if (!HasInputGradient(chunk.mode) || chunk.dx_elsewhere()) return chunk.tokens * token_bytes;
  return chunk.tokens * (token_bytes + hidden_size * kernels::SizeOf(chunk.dx_type));
}

}  // namespace lossd::engine
