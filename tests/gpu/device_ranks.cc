#include "tests/gpu/device_ranks.h"

#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace lossd::kernels::testing {
namespace {

using collectives::Code;
using collectives::Communicator;
using collectives::Operation;
using collectives::RankOrderSum;

constexpr std::chrono::seconds kPatience(30);

}  // namespace

// Where threads wait for each other, and what they show each other meanwhile.
class DeviceRanks::Meeting {
 public:
  explicit Meeting(int32_t ranks) : shown_(static_cast<size_t>(ranks)) {}

  void Show(int rank, const void* what) { shown_[static_cast<size_t>(rank)] = what; }
  const void* Shown(int rank) const { return shown_[static_cast<size_t>(rank)]; }

  // False if a rank does not come, or has gone.
  bool Meet() {
    std::unique_lock lock(mutex_);
    if (closed_) return false;
    const int64_t round = round_;
    if (++came_ == shown_.size()) {
      came_ = 0;
      ++round_;
      changed_.notify_all();
      return true;
    }
    return changed_.wait_for(lock, kPatience, [&] { return round_ != round || closed_; }) && round_ != round;
  }
  void Close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t came_ = 0;
  int64_t round_ = 0;
  bool closed_ = false;
  std::vector<const void*> shown_;
};

class DeviceRanks::DeviceCommunicator final : public Communicator {
 public:
  DeviceCommunicator(int rank, int size, Meeting& meeting) : Communicator(rank, size), meeting_(meeting) {}

 private:
  // What is given is there before the others look at it, and nobody goes on before all have it.
  collectives::Result Carry(Operation /*operation*/, std::span<const Transfer> transfers,
                            void* stream) override {
    LOSSD_COLLECTIVE_TRY(Synchronize(stream));
    meeting_.Show(rank(), transfers.data());
    if (!meeting_.Meet()) return Late();
    for (int peer = 0; peer < size(); ++peer) {
      const Transfer& given = static_cast<const Transfer*>(meeting_.Shown(peer))[rank()];
      const Transfer& taken = transfers[static_cast<size_t>(peer)];
      if (given.send_bytes != taken.receive_bytes) return {Code::kMismatch, "other bytes than were given"};
      if (taken.receive_bytes == 0 || given.send == taken.receive) continue;
      if (cudaMemcpyAsync(taken.receive, given.send, static_cast<size_t>(taken.receive_bytes),
                          cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)) != cudaSuccess) {
        return {Code::kFailed, "copying within the device"};
      }
    }
    LOSSD_COLLECTIVE_TRY(Synchronize(stream));
    return meeting_.Meet() ? collectives::Result() : Late();
  }

  collectives::Result GatherOnHost(Operation /*operation*/, const void* own, int64_t bytes, void* all,
                                   void* stream) override {
    LOSSD_COLLECTIVE_TRY(Synchronize(stream));
    meeting_.Show(rank(), own);
    if (!meeting_.Meet()) return Late();
    for (int peer = 0; peer < size() && bytes > 0; ++peer) {
      std::memcpy(static_cast<char*>(all) + peer * bytes, meeting_.Shown(peer), static_cast<size_t>(bytes));
    }
    return meeting_.Meet() ? collectives::Result() : Late();
  }

  collectives::Result Sum(const RankOrderSum& sum, void* stream) override {
    return collectives::SumInRankOrderOnDevice(sum, stream);
  }
  collectives::Result Synchronize(void* stream) override {
    const bool done = cudaStreamSynchronize(static_cast<cudaStream_t>(stream)) == cudaSuccess;
    return done ? collectives::Result() : collectives::Result(Code::kFailed, "waiting for the stream");
  }
  collectives::Result CheckStream(void* /*stream*/) const override { return {}; }
  void Close() override { meeting_.Close(); }

  static collectives::Result Late() { return {Code::kTimeout, "a rank did not come"}; }

  Meeting& meeting_;
};

DeviceRanks::DeviceRanks(int32_t ranks) : ranks_(ranks), meeting_(std::make_unique<Meeting>(ranks)) {}
DeviceRanks::~DeviceRanks() = default;

std::unique_ptr<Communicator> DeviceRanks::Connect(int32_t rank) {
  return std::make_unique<DeviceCommunicator>(rank, ranks_, *meeting_);
}

int CountDevices() {
  const pid_t process = fork();
  if (process == 0) {
    int devices = 0;
    _exit(cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0);
  }
  int status = 0;
  return process > 0 && waitpid(process, &status, 0) == process && WIFEXITED(status) ? WEXITSTATUS(status)
                                                                                     : 0;
}

void RunOnDevice(int32_t ranks, const DeviceRankBody& body) {
  DeviceRanks all(ranks);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<Communicator> communicator = all.Connect(rank);
      body(rank, *communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lossd::kernels::testing
