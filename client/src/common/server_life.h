// Whose generations are counted.
#ifndef LOSSD_CLIENT_SRC_COMMON_SERVER_LIFE_H_
#define LOSSD_CLIENT_SRC_COMMON_SERVER_LIFE_H_

#include <compare>
#include <cstdint>
#include <string>

namespace lossd::internal {

// One life of a server, which counts anew when it is restarted, or of a set of replicas, which does when all
// of them have gone back to a checkpoint, and not when one of them is restarted.
struct ServerLife {
  std::string incarnation = {};  // of the server; empty if it is a replica
  uint64_t history = 0;          // of the set; 0: there is none

  // That of an answer which says both. A replica that is in no set yet passes for a server.
  template <class Response>
  static ServerLife Of(const Response& response) {
    if (response.history() != 0) return {.history = response.history()};
    return {.incarnation = response.incarnation()};
  }

  bool known() const { return history != 0 || !incarnation.empty(); }
  // Whether it can only be another one. A server, and a replica that is in no set yet, may be of any set.
  bool IsAnotherThan(const ServerLife& other) const {
    return (history != 0) == (other.history != 0) && *this != other;
  }
  auto operator<=>(const ServerLife&) const = default;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_COMMON_SERVER_LIFE_H_
