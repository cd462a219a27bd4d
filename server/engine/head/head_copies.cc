// What a head takes of another one on the same device: a copy, or a moving average.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

constexpr char kNotOverReplicas[] =
    "it can be neither copied nor blended; read its weights, and write them to a head of another server";

absl::Status Head::CheckCopied(uint64_t weight_version) const {
  if (absl::Status alone = CheckAlone(kNotOverReplicas); !alone.ok()) return alone;
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  return weights_.CheckVersion(weight_version, "source_version");
}

void Head::CopyFrom(std::shared_ptr<Head> source, uint64_t weight_version, std::string copy_id,
                    CommitCallback done) {
  // In the source's line, so that writes and steps that were begun before come first.
  const Head* const line = source.get();
  environment_.scheduler->Post(line, [self = shared_from_this(), source = std::move(source), weight_version,
                                      copy_id = std::move(copy_id), done = std::move(done)] {
    done(self->CopyNow(*source, weight_version, copy_id));
  });
}

absl::StatusOr<uint64_t> Head::CopyNow(const Head& source, uint64_t weight_version,
                                       const std::string& copy_id) {
  if (absl::Status can = source.CheckCopied(weight_version); !can.ok()) return can;
  // Until this task ends nothing else on the device thread changes either head.
  WeightStore::State state;
  {
    const MutexLock lock(source.mutex_);
    state = source.weights_.state();
  }
  const bool steps = config_.optimizer.kind != OptimizerKind::kNone;
  absl::Status status = backend_->BlendWeights(*source.backend_, 0);
  if (absl::IsResourceExhausted(status)) return status;
  if (status.ok() && steps) status = backend_->CopyOptimizer(*source.backend_);
  if (!status.ok()) {
    OnDeviceFailure(status);
    return status;
  }
  const MutexLock lock(mutex_);
  weights_.Install({.version = state.version,
                    .optimizer_steps = steps ? state.optimizer_steps : 0,
                    .last_committed_write = copy_id,
                    .last_committed_version = state.version});
  return state.version;
}

std::optional<uint64_t> Head::VersionOfWrite(const std::string& write_id) const {
  const MutexLock lock(mutex_);
  return weights_.VersionOf(write_id);
}

namespace {

template <typename Value>
absl::Status CheckSame(RejectReason reason, absl::string_view what, const Value& source, const Value& target,
                       const HeadConfig& of_source, const HeadConfig& of_target) {
  if (source == target) return absl::OkStatus();
  return Invalid(reason, "source",
                 absl::StrCat("head ", of_source.name, " is ", Describe(of_source), ", head ", of_target.name,
                              " ", Describe(of_target), ": their ", what,
                              " differ, so the weights of one cannot go into those of the other; blend heads "
                              "that are copies of each other (CopyHead)"));
}

}  // namespace

absl::Status Head::CheckFits(const Head& source) const {
  const HeadConfig& from = source.config_;
  if (&source == this) {
    return Invalid(
        RejectReason::kOption, "source",
        absl::StrCat("source is ", config_.name, ", which is the target too; name two heads of one shape"));
  }
  absl::Status status;
  const auto check = [&](RejectReason reason, absl::string_view what, const auto& a, const auto& b) {
    status.Update(CheckSame(reason, what, a, b, from, config_));
  };
  check(RejectReason::kShape, "sizes", std::pair(from.vocab_size, from.hidden_size),
        std::pair(config_.vocab_size, config_.hidden_size));
  check(RejectReason::kDtype, "types", from.weight_type, config_.weight_type);
  check(RejectReason::kOption, "biases", from.bias, config_.bias);
  // They belong to the weights: between two scales there is nothing to be averaged.
  check(RejectReason::kOption, "scales and softcaps", std::pair(from.logit_scale, from.softcap),
        std::pair(config_.logit_scale, config_.softcap));
  return status;
}

absl::StatusOr<std::optional<uint64_t>> Head::BeginBlendLocked(const BlendRequest& request) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  if (const std::optional<uint64_t> version = weights_.VersionOf(request.blend_id); version.has_value()) {
    return version;
  }
  if (absl::Status version = weights_.CheckVersion(request.target_version, "target_version"); !version.ok()) {
    return version;
  }
  if (absl::Status free = weights_.CheckNoWrite(); !free.ok()) return free;
  // What is started later meets the new weights.
  if (frozen() || sessions_.OnlyLooked()) return std::nullopt;
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "head",
                   absl::StrCat("the window of head ", config_.name, " is not empty (", window_.tokens(),
                                " tokens): its gradient is that of the weights which would be replaced. End "
                                "it first, by a step or a flush, or blend into a frozen copy"));
}

void Head::Blend(std::shared_ptr<Head> source, const BlendRequest& request, const CommitCallback& done) {
  if (!std::isfinite(request.decay) || request.decay < 0 || request.decay > 1) {
    return done(Invalid(RejectReason::kOption, "decay",
                        absl::StrCat("decay is ", request.decay, "; it must be in [0, 1]")));
  }
  absl::Status can = CheckAlone(kNotOverReplicas);
  if (can.ok()) can = CheckFits(*source);
  if (!can.ok()) return done(can);
  {
    const MutexLock lock(mutex_);
    can = lifecycle_.alive();
    if (can.ok()) {
      // As weights that are published: behind everything that was accepted before, and behind a step or a
      // write that was asked for.
      PostLastLocked({.changes_weights = true}, [self = shared_from_this(), source = std::move(source),
                                                 request, done] { done(self->BlendNow(*source, request)); });
    }
  }
  if (!can.ok()) done(can);
}

absl::StatusOr<uint64_t> Head::BlendNow(const Head& source, const BlendRequest& request) {
  {
    const MutexLock lock(mutex_);
    const absl::StatusOr<std::optional<uint64_t>> begun = BeginBlendLocked(request);
    if (!begun.ok()) return begun.status();
    if (begun->has_value()) return **begun;
  }
  if (absl::Status can = source.CheckCopied(request.source_version); !can.ok()) return can;
  absl::Status blended;
  if (request.decay < 1) blended = backend_->BlendWeights(*source.backend_, request.decay);
  if (!blended.ok()) {
    OnDeviceFailure(blended);
    return blended;
  }
  const MutexLock lock(mutex_);
  ++environment_.counters->weight_versions;
  return weights_.NoteWrite(request.blend_id);
}

}  // namespace lossd::engine
