#include "client/src/session/chunk_times.h"

namespace lossd::internal {

using Clock = std::chrono::system_clock;

int64_t Microseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
}

void NoteTiming(const v1::ChunkTiming& timing, Clock::time_point sent, Clock::time_point arrived,
                ClockOffset* offset) {
  offset->NoteToServer(Microseconds(sent), timing.received());
  offset->NoteFromServer(timing.received() + timing.answered(), Microseconds(arrived));
}

ChunkTiming ToChunkTiming(const v1::ChunkTiming& timing, Clock::time_point sent, Clock::time_point arrived,
                          const ClockOffset& offset) {
  const int64_t base = timing.received() - offset.value();
  const auto at = [base](int64_t since) {
    return Clock::time_point(std::chrono::microseconds(base + since));
  };
  ChunkTiming result{.sent = sent,
                     .received = at(0),
                     .accepted = at(timing.accepted()),
                     .started = at(timing.started()),
                     .input_ready = at(timing.input_ready()),
                     .compute_started = at(timing.compute_started()),
                     .computed = at(timing.computed()),
                     .output_ready = at(timing.output_ready()),
                     .answered = at(timing.answered()),
                     .arrived = arrived,
                     .clock_error = std::chrono::microseconds(offset.error())};
  if (timing.has_earlier_done()) result.earlier_done = at(timing.earlier_done());
  return result;
}

}  // namespace lossd::internal
