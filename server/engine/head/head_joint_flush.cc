// A flush of the windows of all replicas: docs/decisions/0022-replicas.md.
#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

using kernels::RowSpan;

void Scale(float scale, std::span<float> values) {
  if (scale == 1.0f) return;
  for (float& value : values) value *= scale;
}

}  // namespace

// The sum, wherever it is

void Head::ReadPartOf(int32_t replica, const PartRows& rows,
                      std::function<void(absl::StatusOr<std::string>)> done) {
  if (replica == environment_.place.replica) return ReadPartRows(rows, std::move(done));
  const absl::StatusOr<std::shared_ptr<ReplicaPart>> part = environment_.find_part(*this, replica);
  if (!part.ok()) return done(part.status());
  (*part)->ReadRows(rows, std::move(done));
}

void Head::ReadJointGradient(const std::string& flush_id, const RowSpan& rows, kernels::DataType type,
                             RowsOut out, std::function<void(absl::Status)> done) {
  const absl::StatusOr<std::pair<WindowGradient, float>> gradient = GradientOf(flush_id);
  if (!gradient.ok()) return done(gradient.status());
  const int64_t columns = config_.hidden_size;
  JointRead read{
      .slices = slices_,
      .rows = {.tensor = "", .rows = rows},
      .row_bytes = (columns + (config_.bias ? 1 : 0)) * int64_t{sizeof(float)},
      .read = [self = shared_from_this()](int32_t replica, const PartRows& piece,
                                          std::function<void(absl::StatusOr<std::string>)> answer) {
        self->ReadPartOf(replica, piece, std::move(answer));
      }};
  ReadJointRows(
      std::move(read),
      [rows, type, out, columns, scale = gradient->second](const RowSpan& piece, const std::string& bytes) {
        std::vector<float> values(bytes.size() / sizeof(float));
        std::copy_n(bytes.data(), values.size() * sizeof(float), reinterpret_cast<char*>(values.data()));
        Scale(scale, values);
        const int64_t place = piece.first - rows.first;
        const int64_t elements = piece.count * columns;
        kernels::Convert(kernels::DataType::kFloat32, values.data(), type,
                         static_cast<char*>(out.matrix) + place * columns * kernels::SizeOf(type), elements);
        if (out.bias != nullptr) std::copy(values.begin() + elements, values.end(), out.bias + place);
      },
      // What was read was this flush's if it still holds the window: this one ends it last of all.
      [self = shared_from_this(), flush_id, done = std::move(done)](absl::Status status) {
        if (status.ok()) status = self->CheckFlush(flush_id);
        done(std::move(status));
      });
}

// What it is answered with

FlushInfo Head::DescribeFlush(uint64_t window_tokens, const GradientStats& stats) const {
  const MutexLock lock(mutex_);
  return {.flush_id = FlushIdOf(window_.by()),
          .rows = config_.vocab_size,
          .columns = config_.hidden_size,
          .window_tokens = window_tokens,
          .stats = stats};
}

// One replica's part

absl::Status Head::HoldPart(const FlushInfo& flush) {
  absl::StatusOr<FlushInfo> answer = flush;
  std::vector<FlushCallback> waiters;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.alive().ok()) return lifecycle_.alive();
    const bool summed = window_.state() == WindowState::kSealing && window_.phase() == EndingPhase::kSummed;
    if (!summed || FlushIdOf(window_.by()) != flush.flush_id) {
      return absl::InternalError(absl::StrCat("flush ", flush.flush_id, " of window ", window_.generation(),
                                              " of head ", config_.name, " is not that far, or is over"));
    }
    waiters = SealLocked(&answer);
    waiting = TakeWaitingLocked();
  }
  CountGradient(flush.stats.norm, flush.stats.non_finite);
  for (const FlushCallback& waiter : waiters) waiter(answer);
  Call(waiting);
  return absl::OkStatus();
}

absl::Status Head::EndFlushPart(const std::string& flush_id, FlushFate fate) {
  const absl::Time decided = absl::Now();
  absl::StatusOr<uint64_t> generation = 0;
  std::vector<FateCallback> waiters;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    if (!lifecycle_.alive().ok()) return lifecycle_.alive();
    if (!window_.IsSealedBy(flush_id)) return window_.UnknownFlush(flush_id);
    generation = EndFlushLocked(fate, decided, &waiting);
    waiters = window_.TakeFateWaiters();
  }
  FinishFlush(fate, decided, waiting);
  for (const FateCallback& waiter : waiters) waiter(generation);
  return absl::OkStatus();
}

}  // namespace lossd::engine
