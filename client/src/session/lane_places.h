// Where the lanes of a session are opened: where the head lies over several devices, at each of the processes
// that have them, so that hidden states do not all go through one.
#ifndef LOSSD_CLIENT_SRC_SESSION_LANE_PLACES_H_
#define LOSSD_CLIENT_SRC_SESSION_LANE_PLACES_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace lossd::internal {

// What OpenSessionResponse.lane_addresses means by `address` to a client that has called `target`. Empty:
// that target itself, also where the address cannot be put into it.
std::string ResolveLaneAddress(const std::string& target, const std::string& address);

// Thread-safe.
class LanePlaces {
 public:
  using Clock = std::chrono::steady_clock;

  // An address that could not be used is tried again after so long. It doubles with each further try that
  // fails, since a try may cost a call's whole patience: behind some proxies one connects and is never
  // answered.
  static constexpr Clock::duration kAvoided = std::chrono::seconds(5);
  static constexpr Clock::duration kLongestAvoided = std::chrono::minutes(5);

  // `target`: that of the server which sessions are opened at.
  explicit LanePlaces(std::string target) : target_(std::move(target)) {}

  // What the server told last.
  void Take(const std::vector<std::string>& addresses);
  // From now on every lane is at the target.
  void KeepAtTarget();

  // Where this lane is to be opened; empty: at the target.
  std::string Of(int32_t lane, Clock::time_point now = Clock::now()) const;
  // It could not be, though it could at the target. Lanes that find out while it is avoided change nothing.
  void Avoid(const std::string& place, Clock::time_point now = Clock::now());
  // A lane was opened there.
  void Reached(const std::string& place);

 private:
  struct Avoided {
    Clock::duration time{};
    Clock::time_point until{};
  };

  const std::string target_;
  mutable std::mutex mutex_;
  bool at_target_ = false;
  std::vector<std::string> places_;  // by rank; as Of returns them
  std::map<std::string, Avoided> avoided_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_LANE_PLACES_H_
