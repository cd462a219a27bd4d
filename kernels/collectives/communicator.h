// What ranks do together: moving rows between them and adding them up, on raw pointers and byte counts.
//
// Gloo moves memory of the host (gloo_communicator.h), NCCL that of GPUs (nccl_communicator.h). Both give the
// same bits: whatever is added is added by our own code, in the order of the ranks.
#ifndef LOSSD_KERNELS_COLLECTIVES_COMMUNICATOR_H_
#define LOSSD_KERNELS_COLLECTIVES_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/collectives/rank_order_sum.h"
#include "kernels/collectives/result.h"

namespace lossd::kernels::collectives {

enum class Reduction { kSum, kMin, kMax };

// What messages and the checks between ranks call an operation.
enum class Operation : uint32_t {
  kConnect,
  kAllGatherV,
  kAllToAllV,
  kReduceScatterV,
  kExchange,
  kAllReduce,
  kBarrier,
  kWait,
};
const char* NameOf(Operation operation);

// One of `size` ranks, numbered from 0.
//
// Threads: one thread makes all calls but Abort(), and every rank makes the same calls in the same order with
// counts that agree. Gloo's ranks find out that they do not, and fail with kMismatch; with NCCL it is
// undefined.
//
// Memory: pointers are of the host for Gloo, of the current device for NCCL; a span of counts or of values is
// of the host always. It all stays the caller's, and is in use until the call returns (Gloo) or the stream
// has come so far (NCCL). Where counts are 0 a pointer may be null. Unless said otherwise what is read and
// what is written must not overlap.
//
// Streams: for NCCL `stream` is a cudaStream_t of the communicator's device, what is done is ordered in it,
// and the call returns before it is done; AllReduce, Barrier and Wait return when it is. For Gloo it must be
// null, and every call returns when it is done.
//
// Failure: a call that returns anything but kInvalidArgument has ended the communicator: the other ranks'
// calls fail soon (they find the connection closed, or wait for their timeout; with NCCL one may succeed for
// which everything had come), and every later call fails at once with the same code. What the failed call was
// to write is undefined. Only a new communicator, of all ranks, goes on.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Rank r gives bytes[r] bytes at `own`; everybody gets all of them at `all`, in the order of the ranks,
  // without gaps. `own` may be its own place in `all`.
  Result AllGatherV(const void* own, std::span<const int64_t> bytes, void* all, void* stream);

  // Rank r gets send_bytes[r] bytes of `send`, where what ranks get lies in their order without gaps, and
  // `received` gets receive_bytes[r] from each rank r, laid out in the same way. send_bytes[r] here must be
  // receive_bytes[rank()] at rank r. What a rank sends itself may lie where it receives it.
  Result AllToAllV(const void* send, std::span<const int64_t> send_bytes, void* received,
                   std::span<const int64_t> receive_bytes, void* stream);

  // Each rank gives counts[r] floats at parts[r] for each rank r, and gets in `sum` its own counts[rank()],
  // added over the ranks in their order, in fp32: the same bits every time. `sum` may be parts[rank()].
  // `scratch` is ReduceScatterScratchBytes() of memory that `sum` could also lie in, aligned to 16 bytes.
  Result ReduceScatterV(std::span<const float* const> parts, std::span<const int64_t> counts, float* sum,
                        void* scratch, void* stream);
  // Its two halves, for who has one sum made while the parts of another come: what is given, and what is
  // added up of that. Each is ordered in its own stream; whatever lies between them is the caller's.
  Result ScatterV(std::span<const float* const> parts, std::span<const int64_t> counts, void* scratch,
                  void* stream);
  // `part` is parts[rank()], of `count` floats. No other rank takes part.
  Result AddScattered(const float* part, int64_t count, const void* scratch, float* sum, void* stream);
  // The bytes of `scratch`: 4 (size() - 1) counts[rank()].
  int64_t ReduceScatterScratchBytes(std::span<const int64_t> counts) const;

  // What goes between this rank and another one (or itself): nothing where the bytes are 0.
  struct Transfer {
    const void* send = nullptr;
    int64_t send_bytes = 0;
    void* receive = nullptr;
    int64_t receive_bytes = 0;
  };
  // transfers[r] is between this rank and rank r, wherever it lies: send_bytes here must be receive_bytes
  // there. Those of the one with itself are equal, and may be in one place.
  Result Exchange(std::span<const Transfer> transfers, void* stream);

  // Each of `values`, at most kMostValues numbers of the host, becomes its sum, smallest or largest over the
  // ranks, in their order. A NaN anywhere gives NaN; integers wrap around.
  static constexpr int64_t kMostValues = 64;
  Result AllReduce(Reduction reduction, std::span<double> values, void* stream);
  Result AllReduce(Reduction reduction, std::span<int64_t> values, void* stream);

  // Returns when every rank has called it and what was put on `stream` before is done.
  Result Barrier(void* stream);

  // Returns when what was put on `stream` before is done; fails if that takes longer than the communicator's
  // timeout or a rank is lost. NCCL's errors come to light here: waiting for the stream by CUDA's own calls
  // could wait for ever. Gloo has nothing to wait for.
  Result Wait(void* stream);

  // Lives as long as the communicator: what was found out by it, and is of no use to another one.
  void Keep(std::shared_ptr<void> kept) { kept_.push_back(std::move(kept)); }

  // Why it has ended: what the first call that ended it returned; ok while there is none. For the thread that
  // makes calls, between them, or for another one when that has ended.
  const Result& failure() const { return failure_; }

  // Ends the communicator: a call under way, here and at the other ranks, fails soon, and later ones at once.
  // Any thread may call it, any number of times, while the communicator lives. Best effort: a library that
  // does not let go is left alone, and the process has to end.
  void Abort();

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

  bool aborted() const { return aborted_.load(); }

 private:
  // The operations consist of these, which say in their messages what happened, and leave the operation and
  // the rank to Ended(). They are called by the one thread, and no more once one has failed.

  // See Exchange.
  virtual Result Carry(Operation operation, std::span<const Transfer> transfers, void* stream) = 0;
  // The same between memories of the host, at most 8 kMostValues bytes each; what was on the stream before is
  // done when it returns.
  virtual Result GatherOnHost(Operation operation, const void* own, int64_t bytes, void* all,
                              void* stream) = 0;
  virtual Result Sum(const RankOrderSum& sum, void* stream) = 0;
  virtual Result Synchronize(void* stream) = 0;
  virtual Result CheckStream(void* stream) const = 0;
  // Lets go of the other ranks, so that they and a call under way here notice. Any thread, any number of
  // times.
  virtual void Close() = 0;

  template <class Value>
  Result Reduce(Reduction reduction, std::span<Value> values, void* stream);
  // What a call fails with before it does anything.
  Result Begin(Operation operation, void* stream) const;
  Result Invalid(Operation operation, const std::string& why) const;
  // Names operation and rank in the message of a failure, and ends the communicator.
  Result Ended(Operation operation, Result result);
  Result CheckCounts(Operation operation, std::span<const int64_t> counts) const;
  // The last of an operation whose counts are right.
  Result CarryAll(Operation operation, std::span<const Transfer> transfers, void* stream);
  std::string Prefix(Operation operation) const;

  const int rank_;
  const int size_;
  std::atomic<bool> aborted_ = false;
  Result failure_;  // the first one; of the one thread
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace lossd::kernels::collectives

#endif  // LOSSD_KERNELS_COLLECTIVES_COMMUNICATOR_H_
