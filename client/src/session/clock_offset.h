// What a server's clock shows when one's own shows something, as far as messages between the two can tell.
#ifndef LOSSD_CLIENT_SRC_SESSION_CLOCK_OFFSET_H_
#define LOSSD_CLIENT_SRC_SESSION_CLOCK_OFFSET_H_

#include <algorithm>
#include <cstdint>
#include <limits>

namespace lossd::internal {

// Every message arrives after it was sent: one to the server bounds "theirs minus ours" from above, one from
// there bounds it from below. All in microseconds since the epoch. Not thread-safe.
class ClockOffset {
 public:
  void NoteToServer(int64_t sent_by_us, int64_t received_there) {
    Bound(kNoBound, received_there - sent_by_us);
  }
  void NoteFromServer(int64_t sent_there, int64_t received_by_us) {
    Bound(sent_there - received_by_us, -kNoBound);
  }

  // Zero where that is possible: clocks of one machine agree exactly, and those of others may. Else the
  // middle of what is possible.
  int64_t value() const { return least_ <= 0 && most_ >= 0 ? 0 : least_ + (most_ - least_) / 2; }
  // The truth is at most this far from value(). Of one machine's clocks, whose offset is known to be zero, it
  // says too much.
  int64_t error() const { return std::max(most_ - value(), value() - least_); }

 private:
  static constexpr int64_t kNoBound = std::numeric_limits<int64_t>::min() / 4;

  void Bound(int64_t least, int64_t most) {
    least_ = std::max(least_, least);
    most_ = std::min(most_, most);
    if (least_ <= most_) return;
    // A clock was set, or they drift: only what is new counts.
    least_ = least;
    most_ = most;
  }

  int64_t least_ = kNoBound;
  int64_t most_ = -kNoBound;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_CLOCK_OFFSET_H_
