// A TCP proxy on loopback that does to its connections what networks do, in the middle of whatever they
// carry.
#ifndef LOSSD_TESTS_PROXY_FAULT_PROXY_H_
#define LOSSD_TESTS_PROXY_FAULT_PROXY_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace lossd::testing {

enum class FaultKind {
  kCut,        // both ends are reset
  kStall,      // nothing passes for a time, then it goes on
  kDelay,      // for a time whatever passes comes late, in small pieces
  kMirror,     // what one end sends comes back to it, and goes nowhere else, until an end has had enough
  kRepeat,     // a piece passes twice
  kHalfClose,  // one end is told that nothing more comes; the other one is not heard for a time
};

// What becomes of a fault whose turn comes while nobody would be hit.
enum class IfNobody { kWait, kSkip };

// "cut", "stall", ...
const char* NameOf(FaultKind kind);

// Which end is hit is decided by which one has sent the byte that it happens at. A mirror and a repeat change
// what an end receives: TLS notices, plain text may not, but at a connection's first byte.
struct Fault {
  FaultKind kind = FaultKind::kCut;
  // Bytes of both directions together, since the connection began or since the fault before; at the first one
  // after these it happens.
  int64_t after_bytes = 0;
  std::chrono::milliseconds time{0};  // of a stall, a delay and a half-close
  IfNobody if_nobody = IfNobody::kWait;
};

// Thread-safe.
class FaultProxy {
 public:
  // What happens to the n-th connection (from 0), in this order; empty: nothing. Called by one thread.
  using Plan = std::function<std::vector<Fault>(int connection)>;
  // Both are called by any thread.
  struct Watch {
    // Whether a fault would hit somebody now. Empty: always.
    std::function<bool()> would_hit;
    // It is about to happen, behind so many bytes of the connection.
    std::function<void(int connection, int64_t bytes, const Fault& fault)> happens;
  };

  // `backend`: "ADDRESS:PORT", an IPv4 address, or "unix:PATH". `listen`: "ADDRESS:PORT" of loopback, where
  // port 0 takes a free one.
  explicit FaultProxy(const std::string& backend, Plan plan = {}, Watch watch = {},
                      const std::string& listen = "127.0.0.1:0");
  ~FaultProxy();
  FaultProxy(const FaultProxy&) = delete;
  FaultProxy& operator=(const FaultProxy&) = delete;

  int port() const { return port_; }
  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }
  // Connections that are made from now on go there.
  void set_backend(const std::string& backend);
  void CutAll();
  // From now on nothing passes, of later connections either, and no end is told: as if the host behind had
  // gone.
  void Silence() { silent_ = true; }
  int faults() const { return faults_; }  // of plans, so far

 private:
  struct Connection {
    int number = 0;
    int client = -1;
    int server = -1;
    std::vector<Fault> plan;
    std::atomic<bool> cut = false;
    std::atomic<bool> over = false;
    std::thread thread;
  };
  class Relay;

  void Accept();
  int ConnectToBackend();
  void JoinThoseThatAreOver();

  const Plan plan_;
  const Watch watch_;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> silent_ = false;
  std::atomic<int> faults_ = 0;
  int listener_ = -1;
  int port_ = 0;
  std::mutex mutex_;
  std::string backend_;
  std::list<Connection> connections_;
  std::thread acceptor_;
};

// The plan of a connection that is cut after so many bytes, or never if they are negative.
std::vector<Fault> CutAfter(int64_t bytes);

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_PROXY_FAULT_PROXY_H_
