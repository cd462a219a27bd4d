// Plain counters that the engine and the services write and server/telemetry exports. Lock-free; any thread.
#ifndef LOSSD_SERVER_ENGINE_COMMON_COUNTERS_H_
#define LOSSD_SERVER_ENGINE_COMMON_COUNTERS_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>

#include "server/engine/common/errors.h"

namespace lossd::engine {

using Counter = std::atomic<uint64_t>;
using Gauge = std::atomic<int64_t>;

// What a histogram held at one moment.
template <const auto& kUpperBounds>
class HistogramReading {
 public:
  static constexpr auto& kBounds = kUpperBounds;
  using Buckets = std::array<uint64_t, kUpperBounds.size() + 1>;

  HistogramReading() = default;
  HistogramReading(const Buckets& buckets, double sum) : buckets_(buckets), sum_(sum) {}

  // As those of Histogram.
  uint64_t bucket(size_t i) const { return buckets_[i]; }
  double sum() const { return sum_; }
  // So much of what has yet to be observed.
  void AddToSum(double value) { sum_ += value; }

 private:
  Buckets buckets_{};
  double sum_ = 0;
};

// A histogram in fixed buckets.
template <const auto& kUpperBounds>
class Histogram {
 public:
  static constexpr auto& kBounds = kUpperBounds;

  // Negative ones count as 0: durations may be differences of a clock that was set back.
  void Observe(double value) {
    value = std::max(0.0, value);
    buckets_[BucketOf(value)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }
  // Many at once, for what would otherwise be a write of shared memory for each of them.
  void ObserveAll(std::span<const double> values) {
    typename HistogramReading<kUpperBounds>::Buckets counts{};
    double sum = 0;
    for (double value : values) {
      value = std::max(0.0, value);
      ++counts[BucketOf(value)];
      sum += value;
    }
    for (size_t i = 0; i < counts.size(); ++i) buckets_[i].fetch_add(counts[i], std::memory_order_relaxed);
    sum_.fetch_add(sum, std::memory_order_relaxed);
  }
  // Observations in bucket i alone; i == kBounds.size() holds those above every bound.
  uint64_t bucket(size_t i) const { return buckets_[i].load(std::memory_order_relaxed); }
  double sum() const { return sum_.load(std::memory_order_relaxed); }
  HistogramReading<kUpperBounds> Read() const {
    typename HistogramReading<kUpperBounds>::Buckets buckets;
    for (size_t i = 0; i < buckets.size(); ++i) buckets[i] = bucket(i);
    return {buckets, sum()};
  }

 private:
  static size_t BucketOf(double value) {
    return static_cast<size_t>(std::lower_bound(kBounds.begin(), kBounds.end(), value) - kBounds.begin());
  }

  std::array<Counter, kBounds.size() + 1> buckets_{};
  std::atomic<double> sum_{0};
};

// In seconds, from 100 µs to 30 s.
inline constexpr std::array<double, 17> kDurationBounds = {
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0};
using DurationHistogram = Histogram<kDurationBounds>;

inline constexpr std::array<double, 15> kSizeBounds = {1,   2,   4,    8,    16,   32,   64,   128,
                                                       256, 512, 1024, 2048, 4096, 8192, 16384};
using SizeHistogram = Histogram<kSizeBounds>;

// For what waits for a disk: from 10 ms to 10 minutes.
inline constexpr std::array<double, 14> kLongBounds = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,
                                                       2.5,  5,     10,   30,  60,   300, 600};
using LongHistogram = Histogram<kLongBounds>;

// Something that is done, or fails.
struct OperationCounters {
  Counter ok{0};
  Counter failed{0};
  LongHistogram seconds;  // of both
};

// What a head counts by itself.
struct HeadCounters {
  Counter tokens{0};        // valid; of new chunks, as tokens_valid
  Counter rows_skipped{0};  // as below
  // The ones among these whose loss is finite, and the sum of these losses. Chunks with weights of tokens do
  // not count; those that want losses alone (evaluation) are counted apart.
  Counter loss_tokens{0};
  std::atomic<double> loss_nats{0};
  Counter evaluation_tokens{0};
  std::atomic<double> evaluation_nats{0};
  // Mean of the valid tokens of the last batch that trained with any; may be NaN.
  std::atomic<double> loss{0};
  std::atomic<double> gradient_norm{0};  // as the last call that looked was told
  Gauge queued_chunks{0};
  Counter chunks_rejected{0};  // answered with an error inside their streams
};

struct Counters {
  // Chunks by what became of them. Every chunk read from a stream ends in exactly one of these.
  Counter chunks_accumulated{0};
  Counter chunks_input_gradient{0};  // of frozen heads
  Counter chunks_loss_only{0};
  Counter chunks_repeated{0};
  Counter chunks_rejected{0};   // content: answered inside the stream
  Counter chunks_withdrawn{0};  // accepted, but their stream went away before they were started
  Counter chunks_refused{0};    // position: the stream ended instead

  Counter tokens_valid{0};  // of accumulated, input-gradient and loss-only chunks
  Counter tokens_ignored{0};
  Counter payload_bytes_in{0};
  Counter payload_bytes_out{0};
  Counter rows_redone{0};
  // Batches in two phases that ask for it: rows that phase one has left, and those that phase two was spared
  // or had to compute again.
  Counter rows_held{0};
  Counter rows_taken{0};
  Counter rows_recomputed{0};
  // Tokens of chunks that ask for their hidden states to be held, or bring none since they are.
  Counter hidden_states_held{0};
  Counter hidden_states_not_held{0};
  Counter hidden_states_taken{0};
  Counter hidden_states_gone{0};
  // Among tokens_valid, those that nothing was computed of, since all their factors are 0.
  Counter rows_skipped{0};
  Counter non_finite_hidden_states{0};  // chunks rejected for them
  Counter non_finite_losses{0};         // valid tokens whose loss is not finite
  Counter non_finite_gradients{0};      // elements of dW and db, each time that somebody looked

  Counter flushes_begun{0};
  Counter flushes_committed{0};
  Counter flushes_aborted{0};
  Counter steps_applied{0};
  Counter steps_skipped{0};  // for a gradient that was not finite
  Counter steps_empty{0};    // of windows without a token
  Counter weight_versions{0};
  Counter logits_calls{0};  // answered
  Counter logits_rows{0};   // of these

  Counter heads_parked{0};
  Counter heads_brought_back{0};

  OperationCounters checkpoint_saves;
  OperationCounters checkpoint_restores;
  Counter checkpoint_bytes{0};           // written; what is shared with an earlier checkpoint is not
  Gauge checkpoint_used_bytes{0};        // of the disk, by all that is in --checkpoint_dir
  Gauge checkpoint_saved_at_seconds{0};  // when the last save ended well, since the epoch; 0: none yet
  // Saves that --checkpoint_steps has made due.
  Counter step_saves_ok{0};
  Counter step_saves_failed{0};
  Counter step_saves_passed_over{0};  // the one before was under way
  Counter step_saves_dropped{0};      // the server drained, or the head was deleted, parked or restored
  Gauge step_save_milliseconds{0};    // of the last that ended well, from its step on

  Gauge queued_chunks{0};
  Gauge credit_bytes{0};  // of payloads and answers under way: read and not yet answered on the wire
  Gauge live_streams{0};

  // Everything refused, chunk or call, by reason.
  std::array<Counter, kRejectReasonCount> rejected{};

  // Sizes of the batches that were started.
  SizeHistogram batch_chunks;
  SizeHistogram batch_rows;
  // In the list of each of tokens_valid that has one, by what lists are for.
  SizeHistogram kept_tokens;
  SizeHistogram target_tokens;

  DurationHistogram read_seconds;             // read until accepted
  DurationHistogram queue_seconds;            // accepted until started
  DurationHistogram forward_seconds;          // started until loss and dX are ready
  DurationHistogram weight_gradient_seconds;  // the rest, until dW holds the chunk
  DurationHistogram answer_seconds;           // loss and dX are ready until the answer is on the wire
  DurationHistogram flush_freeze_seconds;     // BeginFlush until sealed
  DurationHistogram flush_read_seconds;       // sealed until committed or aborted
  DurationHistogram flush_commit_seconds;     // the call
  DurationHistogram step_seconds;             // ApplyStep until the next window is open
  DurationHistogram logits_seconds;           // Logits taken until computed

  void Reject(RejectReason reason) {
    rejected[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_COUNTERS_H_
