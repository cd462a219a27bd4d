// What a head takes of another one on the same device: a copy, or a moving average.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

absl::Status Head::CheckCopied(uint64_t weight_version) const {
  const MutexLock lock(mutex_);
  // Over replicas: a broken step leaves rows of two versions, a write may be published elsewhere already.
  if (environment_.place.shared() && (window_.phase() == EndingPhase::kStepping || publishing_prepared_)) {
    return absl::UnavailableError(
        absl::StrCat("the weights of head ", config_.name, " are being changed at all replicas; ask again"));
  }
  return CheckCopiedLocked(weight_version);
}

absl::Status Head::CheckCopiedLocked(uint64_t weight_version) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  // Replicas are put back one after the other.
  const bool shared = environment_.place.shared();
  if (shared && !lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  return weights_.CheckVersion(weight_version, "source_version");
}

absl::StatusOr<std::shared_ptr<const void>> Head::Lend(uint64_t weight_version) {
  const MutexLock lock(mutex_);
  if (absl::Status can = CheckCopiedLocked(weight_version); !can.ok()) return can;
  return lent_->Take();
}

void Head::CopyFrom(std::shared_ptr<Head> source, uint64_t weight_version, std::string copy_id,
                    CommitCallback done) {
  // In the source's line, so that writes and steps that were begun before come first. Over replicas they have
  // (ReplicaSet), and the line may stand still until all meet again.
  const Head* const line = environment_.place.shared() ? nullptr : source.get();
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
                    .last_committed_write = NoteOfCopy(copy_id),
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
  if (const std::optional<uint64_t> version = weights_.VersionOf(NoteOfBlend(request.blend_id));
      version.has_value()) {
    return version;
  }
  if (absl::Status version = weights_.CheckVersion(request.target_version, "target_version"); !version.ok()) {
    return version;
  }
  if (absl::Status free = weights_.CheckNoWrite(); !free.ok()) return free;
  if (absl::Status can = CheckBlendableLocked(); !can.ok()) return can;
  return std::nullopt;
}

// Batches that start later use the new weights; gradients in the window are of the old ones.
absl::Status Head::CheckBlendableLocked() const {
  if (frozen() || sessions_.OnlyLooked()) return absl::OkStatus();
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
  absl::Status can = CheckFits(*source);
  if (!can.ok()) return done(can);
  if (environment_.place.shared()) return BlendTogether(source, request, done);
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
  return weights_.NoteWrite(NoteOfBlend(request.blend_id));
}

// Over replicas: all of them, or none, blend at one place in the order of what they do together
// (WindowEnding), so that the source is the same everywhere.

void Head::BlendTogether(const std::shared_ptr<Head>& source, const BlendRequest& request,
                         CommitCallback done) {
  absl::StatusOr<std::shared_ptr<const void>> lease = source->Lend(request.source_version);
  if (!lease.ok()) {
    // The source may have gone on since this call was answered, and the answer lost.
    const std::optional<uint64_t> version = VersionOfWrite(NoteOfBlend(request.blend_id));
    return done(version.has_value() ? absl::StatusOr<uint64_t>(*version) : lease.status());
  }
  std::optional<absl::StatusOr<uint64_t>> answer;
  std::optional<WindowEnd> together;
  {
    const MutexLock lock(mutex_);
    answer = BeginBlendTogetherLocked({request, *std::move(lease)}, done, &together);
  }
  if (together.has_value()) EndTogether(*std::move(together));
  if (answer.has_value()) done(*std::move(answer));
}

std::optional<absl::StatusOr<uint64_t>> Head::BeginBlendTogetherLocked(BlendEnd blend, CommitCallback& done,
                                                                       std::optional<WindowEnd>* together) {
  if (absl::Status right = CheckEndsWindows(); !right.ok()) return right;
  if (!lifecycle_.may_end_window().ok()) return lifecycle_.may_end_window();
  if (window_.state() == WindowState::kSealed) return window_.CheckOpen();  // by a flush, for any time
  if (window_.state() == WindowState::kSealing) {
    WaitBehindLocked(done, [request = blend.request](Head& head, const CommitCallback& again) {
      const auto source = head.FindSource(request);
      if (!source.ok()) return again(source.status());
      head.BlendTogether(*source, request, again);
    });
    return std::nullopt;
  }
  const absl::StatusOr<std::optional<uint64_t>> begun = BeginBlendLocked(blend.request);
  if (!begun.ok()) return begun.status();
  if (begun->has_value()) return **begun;
  window_.BeginBlend(std::move(blend), std::move(done));
  *together = EndingLocked();
  std::get<BlendEnd>((*together)->by).lease.reset();  // that of the window ends with the blend
  return std::nullopt;
}

absl::Status Head::CheckNotLentLocked() const {
  if (lent_->taken() == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the weights of head ", config_.name,
                                             " go into another head's at all replicas; ask again"));
}

absl::StatusOr<std::shared_ptr<Head>> Head::FindSource(const BlendRequest& request) const {
  absl::StatusOr<std::shared_ptr<Head>> source = environment_.find_head(request.source);
  if (!source.ok()) return source;
  if (absl::Status can = CheckFits(**source); !can.ok()) return can;
  return source;
}

absl::StatusOr<uint64_t> Head::SourceVersion(const BlendRequest& request) const {
  const absl::StatusOr<std::shared_ptr<Head>> source = FindSource(request);
  if (!source.ok()) return source.status();
  if (absl::Status can = (*source)->CheckCopied(request.source_version); !can.ok()) return can;
  return (*source)->weight_version();
}

absl::Status Head::BlendPart(const BlendRequest& request, const ReplicaCommunicators& replicas) {
  if (request.decay == 1) return absl::OkStatus();
  const absl::StatusOr<std::shared_ptr<Head>> source = FindSource(request);
  if (!source.ok()) return source.status();
  if (absl::Status alive = (*source)->CheckAlive(); !alive.ok()) return alive;
  absl::Status blended = backend_->BlendWeights(*(*source)->backend_, request.decay);
  const bool of_slices = config_.master_weights || (*source)->config_.master_weights;
  if (blended.ok() && of_slices && request.decay > 0) blended = backend_->GatherSlices(replicas);
  return blended;
}

void Head::PublishBlend() {
  std::vector<CommitCallback> waiters;
  Resumes waiting;
  uint64_t version = 0;
  {
    const MutexLock lock(mutex_);
    version = weights_.NoteWrite(NoteOfBlend(window_.blend().blend_id));
    waiters = window_.EndBlend();
    waiting = TakeWaitingLocked();
  }
  ++environment_.counters->weight_versions;
  environment_.scheduler->Resume(this);
  for (const CommitCallback& waiter : waiters) waiter(version);
  Call(waiting);
}

}  // namespace lossd::engine
