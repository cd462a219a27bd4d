#include "server/engine/head/step_saver.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/data_type.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr int64_t kAlignment = 256;

int64_t BytesOf(const StateTensor& tensor) {
  return tensor.rows * tensor.columns * kernels::SizeOf(tensor.type);
}
int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool HasEmptyWindow(const CapturedHead& captured) {
  const std::vector<SessionCheckpoint>& sessions = captured.state.sessions;
  return captured.gradients.empty() &&
         std::all_of(sessions.begin(), sessions.end(), [](const SessionCheckpoint& session) {
           return !session.tiles.has_value() || session.tiles->kept.empty();
         });
}

}  // namespace

absl::StatusOr<std::shared_ptr<StepSaver>> StepSaver::Create(int64_t every, const std::string& name,
                                                             const std::vector<StateTensor>& tensors,
                                                             RegionSource* source, MemoryBudget* budget) {
  std::shared_ptr<StepSaver> saver(new StepSaver(every));
  int64_t bytes = 0;
  for (const StateTensor& tensor : tensors) bytes += Aligned(BytesOf(tensor));
  if (bytes == 0) return saver;
  bytes = WholePages(bytes);
  const std::string what = absl::StrCat("the copy of head ", name, " that --checkpoint_steps saves");
  if (budget != nullptr) {
    auto reservation = budget->Reserve(name, what, {{"checkpoint_copy", bytes}});
    if (!reservation.ok()) return reservation.status();
    saver->reservation_ = *std::move(reservation);
  }
  absl::StatusOr<std::shared_ptr<RegionMemory>> memory =
      source->CreateRegionMemory(RegionKind::kSystem, bytes);
  if (!memory.ok()) {
    return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "",
                     absl::StrCat("the system has no ", bytes, " bytes of memory for ", what, " (",
                                  memory.status().message(), ")"));
  }
  saver->memory_ = *std::move(memory);
  std::byte* next = saver->memory_->data();
  for (const StateTensor& tensor : tensors) {
    saver->copies_.push_back({tensor, next});
    next += Aligned(BytesOf(tensor));
  }
  return saver;
}

StepSaver::Due StepSaver::Look(int64_t steps, uint64_t restores) {
  if (steps % every_ != 0) return Due::kNo;
  const MutexLock lock(mutex_);
  if (pending_.has_value()) {
    ++pending_->passed_over;
    return Due::kPassedOver;
  }
  pending_ = Pending{.steps = steps, .restores = restores, .begun = absl::Now()};
  return Due::kBegins;
}

absl::Status StepSaver::Begin(absl::StatusOr<CapturedHead> captured, HeadBackend* backend) {
  if (captured.ok() && !HasEmptyWindow(*captured)) {
    captured = absl::InternalError("a step has ended, and its window is not empty");
  }
  absl::StatusOr<HeadBackend::CopyDone> copied = absl::CancelledError();
  if (captured.ok()) copied = backend->CopyState(copies_);
  const MutexLock lock(mutex_);
  captured_ = std::move(captured);
  if (!captured_.ok()) return absl::OkStatus();
  absl::Status begun = copied.status();
  copied_ = copied.ok() ? *std::move(copied) : [begun] { return begun; };
  return begun;
}

std::optional<StepSaver::Pending> StepSaver::pending() const {
  const MutexLock lock(mutex_);
  return pending_;
}

absl::Status StepSaver::AwaitCopy() {
  HeadBackend::CopyDone copied;
  {
    const MutexLock lock(mutex_);
    copied = copied_;
  }
  return copied == nullptr ? absl::OkStatus() : copied();
}

absl::StatusOr<HeadCheckpoint> StepSaver::WriteTo(StateSink* sink,
                                                  absl::FunctionRef<absl::Status()> go_on) const {
  absl::StatusOr<CapturedHead> captured = CapturedHead{};
  {
    const MutexLock lock(mutex_);
    captured = captured_;
  }
  if (!captured.ok()) return captured.status();
  for (const auto& [tensor, out] : copies_) {
    const std::span<const std::byte> all(static_cast<const std::byte*>(out),
                                         static_cast<size_t>(BytesOf(tensor)));
    const absl::Status written = sink->Add(
        TensorFile(tensor.name), KeyOf(captured->keys, tensor), [&](const StateSink::Append& append) {
          absl::Status status;
          for (size_t first = 0; first < all.size() && status.ok(); first += kPieceBytes) {
            status = go_on();
            if (status.ok()) status = append(all.subspan(first, std::min(kPieceBytes, all.size() - first)));
          }
          return status;
        });
    if (!written.ok()) return written;
    captured->state.tensors.push_back(tensor);
  }
  return std::move(captured->state);
}

int64_t StepSaver::End() {
  const MutexLock lock(mutex_);
  captured_ = CapturedHead{};
  copied_ = nullptr;
  return std::exchange(pending_, std::nullopt)->passed_over;
}

}  // namespace lossd::engine
