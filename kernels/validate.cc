#include "kernels/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <span>

#include "kernels/collectives/communicator.h"
#include "kernels/loss_options.h"

namespace lossd::kernels {
namespace {

// Bytes of an [a, b] matrix of at most 8 bytes an element fit int64_t.
bool Addressable(int64_t a, int64_t b) { return a <= (INT64_MAX / 8) / b; }

bool IsKnown(DataType type) {
  return type == DataType::kFloat32 || type == DataType::kBFloat16 || type == DataType::kFloat16;
}

bool IsWorkspace(const void* workspace, int64_t bytes) {
  return workspace != nullptr && bytes >= 0 && reinterpret_cast<uintptr_t>(workspace) % 64 == 0;
}

bool InRange(const LossOptions& options) {
  return std::all_of(std::begin(kLossOptions), std::end(kLossOptions), [&options](const LossOption& option) {
    return IsIn(option.range, options.*option.value);
  });
}

bool InRange(const Distillation& distillation) {
  const auto is_weight = [](float value) { return std::isfinite(value) && value >= 0; };
  return std::isfinite(distillation.temperature) && distillation.temperature > 0 &&
         is_weight(distillation.weight) && is_weight(distillation.label_weight) && distillation.beta > 0 &&
         distillation.beta < 1;
}

bool IsUsable(const Teacher& teacher, const LinearCrossEntropyParams& params) {
  if (teacher.hidden < 1 || !Addressable(params.vocab, teacher.hidden) ||
      !Addressable(params.tokens, teacher.hidden)) {
    return false;
  }
  if (!IsKnown(teacher.weight_type) || !IsKnown(teacher.hidden_type)) return false;
  if (teacher.weight == nullptr || teacher.hidden_states == nullptr) return false;
  return InRange(LossOptions{.logit_scale = teacher.logit_scale, .softcap = teacher.softcap}) &&
         InRange(params.distillation);
}

// Whether `borders` ascend from 0 to `end`.
template <class Integer>
bool Divide(std::span<const Integer> borders, int64_t end, size_t most) {
  return borders.size() >= 2 && borders.size() <= most + 1 && borders.front() == 0 && borders.back() == end &&
         std::is_sorted(borders.begin(), borders.end());
}

// `vocab`: entries that come with the call.
bool IsUsable(const Shard& shard, int64_t vocab) {
  if (!Divide(shard.borders, shard.vocab, static_cast<size_t>(kFixedSegments)) ||
      !Divide(shard.first_segments, shard.segments(), static_cast<size_t>(kMostRanks))) {
    return false;
  }
  const auto is_rank = [&shard](int32_t rank) { return rank >= 0 && rank < shard.ranks(); };
  if (!is_rank(shard.rank) || !is_rank(shard.answering_rank)) return false;
  if (shard.end() - shard.first() != vocab) return false;
  if (shard.communicator == nullptr) return shard.ranks() == 1;
  return shard.communicator->size() == shard.ranks() && shard.communicator->rank() == shard.rank;
}

// Whether a list has no part in what else is asked for.
bool AreUnlisted(const LinearCrossEntropyParams& params) {
  const bool alone = params.shard == nullptr || params.shard->ranks() == 1;
  return !alone || params.teacher != nullptr || params.options.label_smoothing > 0 ||
         params.returns.top_k > 0;
}

// The same of lists of soft targets, whose entries lie in one piece.
bool AreUntargeted(const LinearCrossEntropyParams& params) {
  const bool whole = params.shard == nullptr || params.shard->segments() == 1;
  return !whole || params.teacher != nullptr || params.kept_tokens.given() ||
         params.options.label_smoothing > 0;
}

bool AreUsable(const TargetLists& targets, const Distillation& distillation) {
  if (targets.lists.tokens == nullptr || targets.probabilities == nullptr) return false;
  return InRange(distillation) && distillation.divergence == Divergence::kForwardKl &&
         distillation.temperature == 1;
}

bool AreUsable(const RowReturns& returns, int64_t vocab) {
  if (returns.top_k < 0 || returns.top_k > std::min<int64_t>(kMostTopK, vocab)) return false;
  if (returns.top_k > 0 && (returns.top_tokens == nullptr || returns.top_log_probabilities == nullptr)) {
    return false;
  }
  // Tokens and ranks are told in 32 bits.
  const bool tells_tokens =
      returns.prediction != nullptr || returns.target_rank != nullptr || returns.top_k > 0;
  return !tells_tokens || vocab <= INT32_MAX;
}

}  // namespace

const char* StatusName(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kInvalidArgument:
      return "invalid argument";
    case Status::kWorkspaceTooSmall:
      return "workspace too small";
    case Status::kUnsupported:
      return "unsupported";
    case Status::kInternal:
      return "internal";
    case Status::kRankLost:
      return "a collective operation between ranks failed";
  }
  return "unknown";
}

Status ValidateInputs(const LinearCrossEntropyParams& params) {
  if (params.tokens < 1 || params.vocab < 1 || params.hidden < 1) return Status::kInvalidArgument;
  if (!Addressable(params.vocab, params.hidden) || !Addressable(params.tokens, params.hidden)) {
    return Status::kInvalidArgument;
  }
  if (!IsKnown(params.weight_type) || !IsKnown(params.hidden_type)) return Status::kInvalidArgument;
  if (params.weight == nullptr || params.hidden_states == nullptr || params.labels == nullptr) {
    return Status::kInvalidArgument;
  }
  if (params.kept_tokens.given() && params.kept_tokens.tokens == nullptr) return Status::kInvalidArgument;
  if (params.target_lists.given() && !AreUsable(params.target_lists, params.distillation)) {
    return Status::kInvalidArgument;
  }
  if (params.teacher != nullptr && !IsUsable(*params.teacher, params)) return Status::kInvalidArgument;
  return InRange(params.options) ? Status::kOk : Status::kInvalidArgument;
}

Status ValidateLogits(const LogitsParams& params) {
  if (params.rows < 1 || params.vocab < 1 || params.hidden < 1) return Status::kInvalidArgument;
  if (!Addressable(params.vocab, params.hidden) || !Addressable(params.rows, params.hidden) ||
      !Addressable(params.rows, params.vocab)) {
    return Status::kInvalidArgument;
  }
  const LogitOutputs& out = params.outputs;
  if (!IsKnown(params.weight_type) || !IsKnown(params.hidden_type) || !IsKnown(out.type)) {
    return Status::kInvalidArgument;
  }
  if (params.weight == nullptr || params.hidden_states == nullptr) return Status::kInvalidArgument;
  if (!InRange(LossOptions{.logit_scale = params.logit_scale, .softcap = params.softcap})) {
    return Status::kInvalidArgument;
  }
  if (params.shard != nullptr && !IsUsable(*params.shard, params.vocab)) return Status::kInvalidArgument;
  const int64_t vocab = params.shard == nullptr ? params.vocab : params.shard->vocab;
  if (out.top_k < 0 || out.top_k > std::min<int64_t>(kMostTopK, vocab)) return Status::kInvalidArgument;
  const bool tells_top = out.top_tokens != nullptr && out.top_logits != nullptr && out.log_sum_exp != nullptr;
  if (out.top_k > 0 && (!tells_top || vocab > INT32_MAX)) return Status::kInvalidArgument;
  return IsWorkspace(params.workspace, params.workspace_bytes) ? Status::kOk : Status::kInvalidArgument;
}

Status ValidateStep(const LinearCrossEntropyParams& params) {
  if (const Status status = ValidateInputs(params); status != Status::kOk) return status;
  const Shard* shard = params.shard;
  if (shard != nullptr && !IsUsable(*shard, params.vocab)) return Status::kInvalidArgument;
  const bool answers = shard == nullptr || shard->answers();
  if ((answers && params.losses == nullptr) || !IsKnown(params.dx_type)) return Status::kInvalidArgument;
  if (!AreUsable(params.returns, shard == nullptr ? params.vocab : shard->vocab)) {
    return Status::kInvalidArgument;
  }
  if (params.kept_tokens.given() && AreUnlisted(params)) return Status::kUnsupported;
  if (params.target_lists.given() && AreUntargeted(params)) return Status::kUnsupported;
  const bool writes_dw = params.weight_gradient != WeightGradient::kNone;
  if (writes_dw && params.dw == nullptr) return Status::kInvalidArgument;
  if (writes_dw && params.bias != nullptr && params.db == nullptr) return Status::kInvalidArgument;
  return IsWorkspace(params.workspace, params.workspace_bytes) ? Status::kOk : Status::kInvalidArgument;
}

}  // namespace lossd::kernels
