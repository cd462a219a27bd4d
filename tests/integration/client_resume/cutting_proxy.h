// A TCP proxy on loopback whose connections break when they are told to, in the middle of whatever they
// carry.
#ifndef LOSSD_TESTS_INTEGRATION_CLIENT_RESUME_CUTTING_PROXY_H_
#define LOSSD_TESTS_INTEGRATION_CLIENT_RESUME_CUTTING_PROXY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>

namespace lossd::testing {

// Thread-safe.
class CuttingProxy {
 public:
  // Bytes, of both directions together, after which the n-th connection (from 0) is reset; negative: never.
  using Budget = std::function<int64_t(int connection)>;

  explicit CuttingProxy(int backend_port, Budget budget = {});
  ~CuttingProxy();
  CuttingProxy(const CuttingProxy&) = delete;
  CuttingProxy& operator=(const CuttingProxy&) = delete;

  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }
  // Of connections made from now on.
  void set_backend(int port) { backend_port_ = port; }
  void CutAll();
  int cuts() const { return cuts_; }  // by budget

 private:
  struct Connection {
    int client = -1;
    int server = -1;
    std::atomic<bool> cut = false;
    std::thread thread;
  };
  void Accept();
  void Serve(Connection* connection, int64_t budget);

  const Budget budget_;
  std::atomic<int> backend_port_;
  std::atomic<bool> stopping_ = false;
  std::atomic<int> cuts_ = 0;
  int listener_ = -1;
  int port_ = 0;
  std::mutex mutex_;
  std::list<Connection> connections_;
  std::thread acceptor_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_CLIENT_RESUME_CUTTING_PROXY_H_
