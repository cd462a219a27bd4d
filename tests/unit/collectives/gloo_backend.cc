#include <cstring>
#include <vector>

#include "kernels/collectives/gloo_communicator.h"
#include "tests/unit/collectives/backend.h"

namespace lossd::kernels::collectives::testing {
namespace {

class HostMemory final : public Memory {
 public:
  explicit HostMemory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {}
  void* data() override { return bytes_.data(); }
  void Set(const void* from, int64_t bytes) override {
    std::memcpy(bytes_.data(), from, static_cast<size_t>(bytes));
  }
  void Get(void* to, int64_t bytes) override { std::memcpy(to, bytes_.data(), static_cast<size_t>(bytes)); }

 private:
  std::vector<char> bytes_;
};

class GlooBackend final : public Backend {
 public:
  std::string Missing(int /*ranks*/) override { return {}; }
  bool NoticesLostPeers() override { return true; }
  std::chrono::milliseconds ShortTimeout() override { return std::chrono::milliseconds(1500); }
  Result Connect(Rank& rank, std::chrono::milliseconds timeout,
                 std::unique_ptr<Communicator>* communicator) override {
    return ConnectGloo({.rank = rank.rank, .size = rank.size, .timeout = timeout}, rank.rendezvous,
                       communicator);
  }
  std::unique_ptr<Memory> Allocate(int64_t bytes) override { return std::make_unique<HostMemory>(bytes); }
  void* Stream() override { return nullptr; }
};

}  // namespace

Backend& BackendUnderTest() {
  static GlooBackend backend;
  return backend;
}

}  // namespace lossd::kernels::collectives::testing
