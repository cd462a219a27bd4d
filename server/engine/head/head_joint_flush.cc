// A flush of the windows of all replicas: docs/decisions/0022-replicas.md.
#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/device/gradient_summary.h"
#include "server/engine/head/head.h"
#include "server/engine/head/replica/joint_rows.h"

namespace lossd::engine {
namespace {

using kernels::RowSpan;

void Scale(float scale, std::span<float> values) {
  if (scale == 1.0f) return;
  for (float& value : values) value *= scale;
}

// Checksums of all rows, which come in order.
struct JointSummary {
  GradientChecksum checksum;
  std::vector<float> bias;
};

}  // namespace

// The sum, wherever it is

void Head::ReadJointSum(const RowSpan& rows, float scale, ReadFrom read_from, SumRows take,
                        std::function<void(absl::Status)> done) {
  const int64_t columns = config_.hidden_size;
  JointRead read{.layout = kernels::SliceLayout(config_.vocab_size, environment_.place.replicas),
                 .slices = slices_,
                 .own = environment_.place.replica,
                 .rows = {.tensor = "", .rows = rows},
                 .row_bytes = (columns + (config_.bias ? 1 : 0)) * int64_t{sizeof(float)},
                 .read = std::move(read_from)};
  ReadJointRows(
      std::move(read),
      [columns, scale, take = std::move(take)](const RowSpan& piece, const std::string& bytes) {
        std::vector<float> values(bytes.size() / sizeof(float));
        std::copy_n(bytes.data(), values.size() * sizeof(float), reinterpret_cast<char*>(values.data()));
        Scale(scale, values);
        const std::span<const float> all(values);
        const auto elements = static_cast<size_t>(piece.count * columns);
        take(piece, all.first(elements), all.subspan(elements));
      },
      std::move(done));
}

void Head::ReadPartOf(int32_t replica, const PartRows& rows,
                      std::function<void(absl::StatusOr<std::string>)> done) {
  if (replica == environment_.place.replica) return ReadPartRows(rows, std::move(done));
  const absl::StatusOr<std::shared_ptr<ReplicaPart>> part = environment_.find_part(*this, replica);
  if (!part.ok()) return done(part.status());
  (*part)->ReadRows(rows, std::move(done));
}

void Head::ReadJointGradient(const std::string& flush_id, const RowSpan& rows, kernels::DataType type,
                             RowsOut out, std::function<void(absl::Status)> done) {
  const absl::StatusOr<std::pair<WindowGradient, float>> read = GradientOf(flush_id);
  if (!read.ok()) return done(read.status());
  const int64_t row_bytes = config_.hidden_size * kernels::SizeOf(type);
  ReadJointSum(
      rows, read->second,
      [self = shared_from_this()](int32_t replica, const PartRows& piece,
                                  std::function<void(absl::StatusOr<std::string>)> answer) {
        self->ReadPartOf(replica, piece, std::move(answer));
      },
      [rows, type, out, row_bytes](const RowSpan& piece, std::span<const float> dw,
                                   std::span<const float> db) {
        const int64_t place = piece.first - rows.first;
        kernels::Convert(kernels::DataType::kFloat32, dw.data(), type,
                         static_cast<char*>(out.matrix) + place * row_bytes, static_cast<int64_t>(dw.size()));
        if (out.bias != nullptr) std::copy(db.begin(), db.end(), out.bias + place);
      },
      // What was read was this flush's if it still holds the window: this one ends it last of all.
      [self = shared_from_this(), flush_id, done = std::move(done)](absl::Status status) {
        if (status.ok()) status = self->CheckFlush(flush_id);
        done(std::move(status));
      });
}

// What it is answered with

void Head::DescribeFlush(uint64_t window_tokens, const GradientStats& stats, ReadFrom read,
                         FlushCallback done) {
  FlushInfo flush;
  flush.rows = config_.vocab_size;
  flush.columns = config_.hidden_size;
  flush.window_tokens = window_tokens;
  float scale = 1.0f;
  {
    const MutexLock lock(mutex_);
    flush.flush_id = FlushIdOf(window_.by());
    scale = window_.flush_scale();
  }
  flush.summary = {.norm = stats.norm, .checksum = 0, .non_finite = stats.non_finite};
  const auto summary = std::make_shared<JointSummary>();
  ReadJointSum(
      {0, config_.vocab_size}, scale, std::move(read),
      [summary](const RowSpan& /*piece*/, std::span<const float> dw, std::span<const float> db) {
        summary->checksum.Add(dw);
        summary->bias.insert(summary->bias.end(), db.begin(), db.end());
      },
      [summary, flush, bias = config_.bias, done = std::move(done)](const absl::Status& all) mutable {
        if (!all.ok()) return done(all);
        flush.summary.checksum = summary->checksum.Value();
        if (bias) {
          GradientSummarizer of_bias;
          of_bias.Add(summary->bias);
          flush.bias_summary = of_bias.Finish();
          flush.summary.non_finite -= flush.bias_summary->non_finite;
        }
        done(std::move(flush));
      });
}

// One replica's part

absl::Status Head::CheckFlushPartLocked(const std::string& flush_id,
                                        std::initializer_list<EndingPhase> phases) const {
  if (!lifecycle_.alive().ok()) return lifecycle_.alive();
  const bool right = window_.state() != WindowState::kOpen && FlushIdOf(window_.by()) == flush_id &&
                     std::find(phases.begin(), phases.end(), window_.phase()) != phases.end();
  if (right) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("flush ", flush_id, " of window ", window_.generation(),
                                          " of head ", config_.name, " is not that far, or is over"));
}

absl::Status Head::HoldPart(const FlushInfo& flush) {
  absl::StatusOr<FlushInfo> answer = flush;
  std::vector<FlushCallback> waiters;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    // Again, and what it ends in may be known by now.
    if (window_.IsSealedBy(flush.flush_id)) return absl::OkStatus();
    absl::Status phase = CheckFlushPartLocked(flush.flush_id, {EndingPhase::kSummed});
    if (!phase.ok()) return phase;
    waiters = SealLocked(&answer);
    waiting = TakeWaitingLocked();
  }
  CountFlush(flush);
  for (const FlushCallback& waiter : waiters) waiter(answer);
  Call(waiting);
  return absl::OkStatus();
}

absl::Status Head::DecidePart(const std::string& flush_id, FlushFate fate) {
  const MutexLock lock(mutex_);
  const EndingPhase decided = fate == FlushFate::kCommit ? EndingPhase::kCommitting : EndingPhase::kAborting;
  absl::Status phase = CheckFlushPartLocked(flush_id, {EndingPhase::kSummed, decided});
  if (phase.ok()) window_.Decide(fate);
  return phase;
}

absl::Status Head::EndFlushPart(const std::string& flush_id) {
  FlushFate fate = FlushFate::kCommit;
  absl::Time decided;
  absl::StatusOr<uint64_t> generation = 0;
  std::vector<FateCallback> waiters;
  Resumes waiting;
  {
    const MutexLock lock(mutex_);
    absl::Status phase = CheckFlushPartLocked(flush_id, {EndingPhase::kCommitting, EndingPhase::kAborting});
    if (!phase.ok()) return phase;
    fate = window_.phase() == EndingPhase::kCommitting ? FlushFate::kCommit : FlushFate::kAbort;
    decided = window_.decided_at();
    generation = EndFlushLocked(&waiting);
    waiters = window_.TakeFateWaiters();
  }
  FinishFlush(fate, decided, waiting);
  for (const FateCallback& waiter : waiters) waiter(generation);
  return absl::OkStatus();
}

}  // namespace lossd::engine
