#include "kernels/collectives/nccl_communicator.h"

#include <cuda_runtime.h>
#include <sched.h>
#include <time.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "kernels/collectives/nccl_library.h"

namespace lossd::kernels::collectives {
namespace {

using Clock = std::chrono::steady_clock;

// What Abort() and the end of a communicator wait for a call of NCCL's that another thread is in, before they
// leave the communicator as it is.
constexpr std::chrono::seconds kPatience(5);
constexpr int64_t kStagingBytes = Communicator::kMostValues * 8;

// Waits a little, and longer the longer it goes on: most waits end soon. Sleeping for however little takes a
// twentieth of a millisecond, as long as what is waited for, so at first it does not.
class Pause {
 public:
  void operator()() {
    if (Clock::now() < awake_until_) {
      sched_yield();
      return;
    }
    const timespec pause{.tv_sec = 0, .tv_nsec = nanoseconds_};
    nanosleep(&pause, nullptr);
    if (nanoseconds_ < 100000) nanoseconds_ *= 2;
  }

 private:
  const Clock::time_point awake_until_ = Clock::now() + std::chrono::microseconds(200);
  int32_t nanoseconds_ = 1000;
};

// CUDA's errors stay: all that comes behind one fails, but for memory that there is not enough of.
Result CudaResult(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return {};
  const Code code = status == cudaErrorMemoryAllocation ? Code::kFailed : Code::kDeviceFailed;
  return {code, std::string(what) + ": " + cudaGetErrorString(status)};
}

struct FreeDevice {
  void operator()(void* memory) const { (void)cudaFree(memory); }
};
struct FreeHost {
  void operator()(void* memory) const { (void)cudaFreeHost(memory); }
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const NcclOptions& options, std::shared_ptr<const NcclLibrary> library)
      : Communicator(options.rank, options.size), timeout_(options.timeout), nccl_(std::move(library)) {}
  ~NcclCommunicator() override;

  // Nothing else is called before it has succeeded.
  Result Connect(const NcclOptions& options, Rendezvous& rendezvous);

 private:
  Result Carry(Operation operation, std::span<const Transfer> transfers, void* stream) override;
  Result GatherOnHost(Operation operation, const void* own, int64_t bytes, void* all, void* stream) override;
  Result Sum(const RankOrderSum& sum, void* stream) override;
  Result Synchronize(void* stream) override;
  Result CheckStream(void* /*stream*/) const override { return {}; }
  void Close() override;

  // Gives what is to be exchanged to NCCL as one group.
  Result Group(std::span<const Transfer> transfers, cudaStream_t stream);
  // Waits until NCCL has taken what it was given. The communicator must be there, and turn_ free.
  Result Settle(Clock::time_point deadline);
  // Under turn_: the state of the communicator, kInProgress included.
  NcclStatus State();
  Result Explain(NcclStatus status);
  Result TooLate() const;

  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<const NcclLibrary> nccl_;
  std::unique_ptr<void, FreeDevice> device_staging_;  // [1 + size, kStagingBytes]
  std::unique_ptr<void, FreeHost> host_staging_;      // the same, page-locked

  // Held for single calls of NCCL's, which do not block: waiting is done without it, so that Close() gets its
  // turn.
  std::timed_mutex turn_;
  NcclComm* comm_ = nullptr;  // guarded by turn_; null once it has been aborted
};

NcclCommunicator::~NcclCommunicator() {
  const std::unique_lock<std::timed_mutex> lock(turn_, kPatience);
  if (!lock.owns_lock() || comm_ == nullptr) return;
  // Ends what is under way in good order, or by force if a rank does not do its part.
  const Clock::time_point deadline = Clock::now() + timeout_;
  NcclStatus status = nccl_->finalize(comm_);
  for (Pause pause; status == NcclStatus::kInProgress && Clock::now() < deadline; pause()) status = State();
  (void)(status == NcclStatus::kSuccess ? nccl_->destroy(comm_) : nccl_->abort(comm_));
}

Result NcclCommunicator::Connect(const NcclOptions& options, Rendezvous& rendezvous) {
  LOSSD_COLLECTIVE_TRY(CudaResult(cudaSetDevice(options.device), "making the device current"));
  const auto bytes = static_cast<size_t>((1 + size()) * kStagingBytes);
  void* memory = nullptr;
  LOSSD_COLLECTIVE_TRY(CudaResult(cudaMalloc(&memory, bytes), "memory of the device"));
  device_staging_.reset(memory);
  LOSSD_COLLECTIVE_TRY(CudaResult(cudaMallocHost(&memory, bytes), "page-locked memory"));
  host_staging_.reset(memory);
  if (size() == 1) return {};

  NcclUniqueId id{};
  std::string own;
  if (rank() == 0) {
    const NcclStatus status = nccl_->get_unique_id(&id);
    if (status != NcclStatus::kSuccess) return {Code::kFailed, nccl_->Describe(status, nullptr)};
    own.assign(id.bytes, sizeof(id.bytes));
  }
  std::vector<std::string> all;
  const std::chrono::milliseconds timeout =
      options.connect_timeout.count() > 0 ? options.connect_timeout : options.timeout;
  LOSSD_COLLECTIVE_TRY(rendezvous.AllGather(std::move(own), timeout, &all));
  if (all.size() != static_cast<size_t>(size()) || all[0].size() != sizeof(id.bytes)) {
    return {Code::kMismatch, "the rendezvous did not give the id of rank 0 of " + std::to_string(size())};
  }
  std::memcpy(id.bytes, all[0].data(), sizeof(id.bytes));

  NcclConfig config;
  config.blocking = 0;
  // NCCL takes no lower bound above its own upper one.
  if (options.least_blocks > 0) config.min_ctas = config.max_ctas = options.least_blocks;
  if (options.most_blocks > 0) {
    config.min_ctas = 1;
    config.max_ctas = options.most_blocks;
    // In pairs: single ones would each leave a multiprocessor without the neighbour that clusters of two
    // need.
    config.cga_cluster_size = options.most_blocks > 1 ? 2 : 0;
  }
  const Clock::time_point deadline = Clock::now() + timeout;
  {
    const std::lock_guard<std::timed_mutex> lock(turn_);
    const NcclStatus status = nccl_->init_rank(&comm_, size(), id, rank(), &config);
    if (status != NcclStatus::kSuccess && status != NcclStatus::kInProgress) return Explain(status);
  }
  const Result settled = Settle(deadline);
  if (!settled.ok()) Close();
  return settled;
}

Result NcclCommunicator::Carry(Operation /*operation*/, std::span<const Transfer> transfers, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const Transfer& self = transfers[static_cast<size_t>(rank())];
  if (self.send_bytes > 0 && self.send != self.receive) {
    LOSSD_COLLECTIVE_TRY(
        CudaResult(cudaMemcpyAsync(self.receive, self.send, static_cast<size_t>(self.send_bytes),
                                   cudaMemcpyDeviceToDevice, on),
                   "copying within the device"));
  }
  if (size() == 1) return {};
  const Clock::time_point deadline = Clock::now() + timeout_;
  LOSSD_COLLECTIVE_TRY(Group(transfers, on));
  return Settle(deadline);
}

Result NcclCommunicator::Group(std::span<const Transfer> transfers, cudaStream_t stream) {
  const std::lock_guard<std::timed_mutex> lock(turn_);
  if (comm_ == nullptr) return {Code::kAborted, "aborted"};
  NcclStatus status = nccl_->group_start();
  if (status != NcclStatus::kSuccess) return Explain(status);
  const auto step = [&status](NcclStatus next) {
    if (status == NcclStatus::kSuccess || status == NcclStatus::kInProgress) status = next;
  };
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size();
    const int from = (rank() - i + size()) % size();
    const Transfer& sent = transfers[static_cast<size_t>(to)];
    const Transfer& got = transfers[static_cast<size_t>(from)];
    if (sent.send_bytes > 0) {
      step(nccl_->send(sent.send, static_cast<size_t>(sent.send_bytes), NcclLibrary::kBytes, to, comm_,
                       stream));
    }
    if (got.receive_bytes > 0) {
      step(nccl_->receive(got.receive, static_cast<size_t>(got.receive_bytes), NcclLibrary::kBytes, from,
                          comm_, stream));
    }
  }
  step(nccl_->group_end());  // also after a failure: the group is the thread's
  if (status == NcclStatus::kSuccess || status == NcclStatus::kInProgress) return {};
  return Explain(status);
}

NcclStatus NcclCommunicator::State() {
  NcclStatus state = NcclStatus::kSuccess;
  const NcclStatus asked = nccl_->get_async_error(comm_, &state);
  return asked == NcclStatus::kSuccess ? state : asked;
}

Result NcclCommunicator::Settle(Clock::time_point deadline) {
  for (Pause pause;; pause()) {
    {
      const std::lock_guard<std::timed_mutex> lock(turn_);
      if (comm_ == nullptr) return {Code::kAborted, "aborted"};
      const NcclStatus state = State();
      if (state == NcclStatus::kSuccess) return {};
      if (state != NcclStatus::kInProgress) return Explain(state);
    }
    if (Clock::now() >= deadline) return TooLate();
  }
}

Result NcclCommunicator::Synchronize(void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const Clock::time_point deadline = Clock::now() + timeout_;
  for (Pause pause;; pause()) {
    const cudaError_t status = cudaStreamQuery(on);
    if (status == cudaSuccess) return {};
    if (status != cudaErrorNotReady) return CudaResult(status, "waiting for the stream");
    if (aborted()) return {Code::kAborted, "aborted"};
    if (size() > 1) {
      const std::lock_guard<std::timed_mutex> lock(turn_);
      if (comm_ == nullptr) return {Code::kAborted, "aborted"};
      const NcclStatus state = State();
      if (state != NcclStatus::kSuccess && state != NcclStatus::kInProgress) return Explain(state);
    }
    if (Clock::now() >= deadline) return TooLate();
  }
}

Result NcclCommunicator::Explain(NcclStatus status) {
  return {status == NcclStatus::kRemoteError ? Code::kPeerLost : Code::kFailed,
          nccl_->Describe(status, comm_)};
}

Result NcclCommunicator::TooLate() const {
  return {Code::kTimeout, "not done within " + std::to_string(timeout_.count()) +
                              " ms; NCCL does not say which rank is missing"};
}

Result NcclCommunicator::GatherOnHost(Operation operation, const void* own, int64_t bytes, void* all,
                                      void* stream) {
  if (bytes == 0) return Synchronize(stream);
  const auto on = static_cast<cudaStream_t>(stream);
  const auto all_bytes = static_cast<size_t>(bytes * size());
  char* const on_host = static_cast<char*>(host_staging_.get());
  char* const on_device = static_cast<char*>(device_staging_.get());
  std::memcpy(on_host, own, static_cast<size_t>(bytes));
  LOSSD_COLLECTIVE_TRY(
      CudaResult(cudaMemcpyAsync(on_device, on_host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, on),
                 "copying to the device"));
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < size(); ++peer) {
    transfers.push_back({on_device, bytes, on_device + kStagingBytes + peer * bytes, bytes});
  }
  LOSSD_COLLECTIVE_TRY(Carry(operation, transfers, stream));
  LOSSD_COLLECTIVE_TRY(CudaResult(cudaMemcpyAsync(on_host + kStagingBytes, on_device + kStagingBytes,
                                                  all_bytes, cudaMemcpyDeviceToHost, on),
                                  "copying from the device"));
  LOSSD_COLLECTIVE_TRY(Synchronize(stream));
  std::memcpy(all, on_host + kStagingBytes, all_bytes);
  return {};
}

Result NcclCommunicator::Sum(const RankOrderSum& sum, void* stream) {
  return SumInRankOrderOnDevice(sum, stream);
}

void NcclCommunicator::Close() {
  const std::unique_lock<std::timed_mutex> lock(turn_, kPatience);
  if (!lock.owns_lock() || comm_ == nullptr) return;
  (void)nccl_->abort(std::exchange(comm_, nullptr));
}

}  // namespace

Result ConnectNccl(const NcclOptions& options, Rendezvous& rendezvous,
                   std::unique_ptr<Communicator>* communicator) {
  const auto refused = [&](const Result& result) {
    return Result(result.code(), std::string(NameOf(Operation::kConnect)) + ": rank " +
                                     std::to_string(options.rank) + " of " + std::to_string(options.size) +
                                     ": " + result.message());
  };
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return refused({Code::kInvalidArgument, "there is no such rank"});
  }
  if (options.timeout < std::chrono::milliseconds(1)) {
    return refused({Code::kInvalidArgument, "the timeout must be at least 1 ms"});
  }
  if (options.most_blocks < 0) {
    return refused({Code::kInvalidArgument, "the number of thread blocks must not be negative"});
  }
  PrepareNccl(options.interface);
  std::shared_ptr<const NcclLibrary> library;
  Result result = NcclLibrary::Open(options.library, &library);
  if (!result.ok()) return refused(result);
  try {
    auto connected = std::make_unique<NcclCommunicator>(options, std::move(library));
    result = connected->Connect(options, rendezvous);
    if (!result.ok()) return refused(result);
    *communicator = std::move(connected);
  } catch (const std::exception& exception) {
    return refused({Code::kFailed, exception.what()});
  }
  return {};
}

void PrepareNccl(const std::string& interface) {
  // NVLS adds bf16 in an order that depends on the history of allocations (NVIDIA/nccl#2360).
  const char* const set = getenv("NCCL_NVLS_ENABLE");
  if (set == nullptr || std::strcmp(set, "0") != 0) setenv("NCCL_NVLS_ENABLE", "0", /*replace=*/1);
  // With the = it is this one, and none whose name only begins so.
  if (!interface.empty()) setenv("NCCL_SOCKET_IFNAME", ("=" + interface).c_str(), /*replace=*/0);
}

}  // namespace lossd::kernels::collectives
