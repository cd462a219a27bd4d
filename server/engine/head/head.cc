#include "server/engine/head/head.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

std::atomic<uint64_t> heads_made = 0;

// Calls for logits of a head may together hold as many bytes as this number of the largest calls.
constexpr int64_t kLargestLogitsCalls = 8;

// The part of the environment that is shared: the second gradient belongs to this head alone.
HeadEnvironment Shared(HeadEnvironment environment) {
  environment.second_gradient = nullptr;
  return environment;
}

SessionTable::Settings SettingsOf(const HeadConfig& config, const HeadEnvironment& environment) {
  return {.head = config.name,
          .frozen = config.weight_gradients == WeightGradients::kFrozen,
          .hidden_size = config.hidden_size,
          .limits = environment.limits,
          .place_timeout = environment.place_timeout,
          .fixed_segments = environment.device->HasFixedSegments(config)};
}

std::vector<std::vector<kernels::RowSpan>> SlicesOf(const HeadConfig& config, const ReplicaPlace& place,
                                                    const HeadBackend& backend) {
  const kernels::SliceLayout layout(config.vocab_size, place.replicas);
  std::vector<std::vector<kernels::RowSpan>> slices;
  for (int32_t slice = 0; slice < place.replicas; ++slice) {
    slices.push_back(backend.SliceRows(layout, slice));
  }
  return slices;
}

// The most tokens of a list that the workspace has room for.
int64_t LongestListOf(const HeadBackend& backend) {
  int64_t fits = 0;
  int64_t too_many = kMostListedTokens + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (backend.HasRoomForList(middle) ? fits : too_many) = middle;
  }
  return fits;
}

}  // namespace

Head::Head(HeadConfig config, HeadEnvironment environment, std::unique_ptr<HeadBackend> backend,
           std::unique_ptr<MemoryReservation> reservation)
    : config_(std::move(config)),
      environment_(Shared(environment)),
      number_(++heads_made),
      reservation_(std::move(reservation)),
      backend_(std::move(backend)),
      backend_address_(backend_.get()),
      slices_(SlicesOf(config_, environment_.place, *backend_)),
      gradients_(config_, backend_address_, environment_.device, std::move(environment.second_gradient)),
      batches_({.config = &config_,
                .backend = backend_address_,
                .device = environment_.device,
                .counters = environment_.counters,
                .head_counters = &counters_,
                .device_done = environment_.device_done}),
      history_(environment_.incarnation),
      sessions_(SettingsOf(config_, environment_), environment_.counters, &counters_),
      window_(gradients_.has_second() ? Gradients::kTwo : Gradients::kOne),
      weights_(config_.name),
      logits_(config_.name, kLargestLogitsCalls * MostLogitsBytes(environment_.limits)),
      logits_rows_(backend_->RowsOfLogits()),
      holds_(backend_->Holds()),
      longest_list_(LongestListOf(*backend_)) {}

Head::~Head() = default;

absl::Status Head::CheckDiscard(DiscardGradient discard) const {
  const MutexLock lock(mutex_);
  return CheckDiscardLocked(discard);
}

absl::Status Head::BeginDeletion(DiscardGradient discard) {
  const MutexLock lock(mutex_);
  if (absl::Status may = CheckDiscardLocked(discard); !may.ok()) return may;
  // Replicas exchange what they know of it: without it at one of them, the others would wait.
  if (window_.awaited()) {
    return absl::UnavailableError(absl::StrCat("window ", window_.generation(), " of head ", config_.name,
                                               " is being ended at all replicas; delete it when it is"));
  }
  if (absl::Status none = CheckNothingPreparedLocked(); !none.ok()) return none;
  if (absl::Status unused = CheckNotLentLocked(); !unused.ok()) return unused;
  lifecycle_.BeginDeletion(
      absl::UnavailableError(absl::StrCat("head ", config_.name, " is being deleted; ask again")));
  return absl::OkStatus();
}

void Head::CancelDeletion() {
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.deleting()) return;
    lifecycle_.CancelDeletion();
    waiting = TakeWaitingLocked();
  }
  Call(waiting);
}

absl::Status Head::CheckDiscardLocked(DiscardGradient discard) const {
  if (discard == DiscardGradient::kYes || frozen() || sessions_.WindowEmpty()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "discard_gradient",
                   absl::StrCat("the window of head ", config_.name, " holds gradients of ", window_.tokens(),
                                " tokens; flush it, or set discard_gradient"));
}

absl::Status Head::MarkDeleted(const absl::Status& status, DiscardGradient discard) {
  const MutexLock lock(mutex_);
  if (absl::Status may = CheckDiscardLocked(discard); !may.ok()) return may;
  lifecycle_.End(status);
  return absl::OkStatus();
}

void Head::Shutdown(std::function<void()> released) {
  std::map<std::string, Student> students;
  absl::Status ended;
  {
    const MutexLock lock(mutex_);
    ended = lifecycle_.alive();
    students = std::exchange(students_, {});
  }
  EndStreams(ended);
  for (const auto& [session_id, student] : students) student.Resume();
  environment_.scheduler->Resume(this);
  const MutexLock lock(mutex_);
  PostLastLocked({.closes = LastTask::Closes::kNone, .changes_weights = true},
                 [self = shared_from_this(), released = std::move(released)] {
                   self->teaching_.WhenUnused([head = self.get(), released] {
                     head->Release();
                     released();
                   });
                 });
}

void Head::EndStreams(const absl::Status& status) {
  SessionTable::Cut cut;
  {
    const MutexLock lock(mutex_);
    sessions_.DetachAll(&cut);
    FinishCutLocked(cut);
  }
  TellEnd(cut, status);
}

// Everything is freed without the lock.
void Head::Release() {
  std::unique_ptr<MemoryReservation> reservation;
  std::shared_ptr<Gradient> second = gradients_.Release();
  std::unique_ptr<HeadBackend> backend = std::move(backend_);  // goes before its reservation
  std::shared_ptr<StagedWrite> staged;
  SessionTable::DeterministicSessions sessions;
  SessionTable::DeterministicSessions restored;
  {
    const MutexLock lock(mutex_);
    staged = weights_.Release();
    sessions = sessions_.TakeDeterministic();
    restored.swap(restored_sessions_);
    reservation = std::move(reservation_);
  }
  for (const auto& [id, session] : sessions) Drop(session->memory);
  for (const auto& [id, session] : restored) Drop(session->memory);
}

void Head::BeginDrain(const absl::Status& status) {
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    lifecycle_.Drain(status);
    waiting = TakeWaitingLocked();
  }
  Call(waiting);
}

// dW may hold part of a chunk.
void Head::OnDeviceFailure(const absl::Status& status) {
  {
    const MutexLock lock(mutex_);
    lifecycle_.End(status);
  }
  EndStreams(status);
  environment_.scheduler->Resume(this);  // what waits is told
  environment_.on_device_failure(status);
}

void Head::CountGradient(double norm, int64_t non_finite) {
  counters_.gradient_norm = norm;
  environment_.counters->non_finite_gradients += static_cast<uint64_t>(non_finite);
}

}  // namespace lossd::engine
