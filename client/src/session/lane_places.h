// Where the lanes of a session are opened: at the replica that has the session, and where the head lies over
// several devices, at each of the processes that have them, so that hidden states do not all go through one.
#ifndef LOSSD_CLIENT_SRC_SESSION_LANE_PLACES_H_
#define LOSSD_CLIENT_SRC_SESSION_LANE_PLACES_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
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

  // What the server at `target` told last. `home`: where it is itself, empty if at the target; or nothing,
  // where another one has the session, which is at the first of its addresses.
  void Take(const std::string& target, const std::vector<std::string>& addresses,
            const std::optional<std::string>& home = "");
  // From now on every lane is at home.
  void KeepHome();

  // Where any lane may be: the server that has the session. Empty: at the target.
  std::string home() const;
  // Whether that is another replica.
  bool elsewhere() const;
  // Where this lane is to be opened; empty: at the target.
  std::string Of(int32_t lane, Clock::time_point now = Clock::now()) const;
  // It could not be, though it could at home. Lanes that find out while it is avoided change nothing.
  void Avoid(const std::string& place, Clock::time_point now = Clock::now());
  // A lane was opened there.
  void Reached(const std::string& place);

 private:
  struct Avoided {
    Clock::duration time{};
    Clock::time_point until{};
  };

  mutable std::mutex mutex_;
  bool all_home_ = false;
  std::string home_;
  bool elsewhere_ = false;
  std::vector<std::string> places_;  // by rank; as Of returns them
  std::map<std::string, Avoided> avoided_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_LANE_PLACES_H_
