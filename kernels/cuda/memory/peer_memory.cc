#include "kernels/cuda/memory/peer_memory.h"

#include <cuda.h>

#include <array>
#include <cstring>
#include <utility>

namespace lossd::kernels::cuda {
namespace {

using collectives::Communicator;
using collectives::Reduction;

// What a rank tells the others of its memory: the handle of the allocation, where in it the memory begins,
// and whether there is one.
constexpr size_t kHandleWords = sizeof(cudaIpcMemHandle_t) / sizeof(int64_t);
using Told = std::array<int64_t, kHandleWords + 2>;
static_assert(std::tuple_size_v<Told> <= Communicator::kMostValues);

Result FromCollectives(const collectives::Result& result) {
  if (result.ok()) return {};
  return {cudaErrorExternalDevice, "telling other ranks of memory"};
}

// A function of the driver's: asked for at run time, so that programs start on machines without a driver.
template <class Function>
Result Find(const char* name, unsigned int version, Function* function) {
  if (*function != nullptr) return {};
  void* found_function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  LOSSD_CUDA_TRY(cudaGetDriverEntryPointByVersion(name, &found_function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    return {cudaErrorNotSupported, "finding a function of the driver"};
  }
  *function = reinterpret_cast<Function>(found_function);
  return {};
}

// Bytes from where its allocation begins to `memory`.
Result PlaceInAllocation(const void* memory, int64_t* place) {
  static decltype(&cuMemGetAddressRange) get_range = nullptr;
  LOSSD_CUDA_PASS_ON(Find("cuMemGetAddressRange", 3020, &get_range));
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  if (get_range(&begin, &bytes, address) != CUDA_SUCCESS) {
    return {cudaErrorInvalidValue, "cuMemGetAddressRange"};
  }
  *place = static_cast<int64_t>(address - begin);
  return {};
}

Told Describe(void* memory) {
  Told told{};
  cudaIpcMemHandle_t handle{};
  if (!PlaceInAllocation(memory, &told[kHandleWords]).ok() ||
      cudaIpcGetMemHandle(&handle, memory) != cudaSuccess) {
    (void)cudaGetLastError();  // is not for the next call to report
    return {};
  }
  std::memcpy(told.data(), &handle, sizeof(handle));
  told[kHandleWords + 1] = 1;
  return told;
}

}  // namespace

PeerMemory::PeerMemory(PeerMemory&& other) noexcept { *this = std::move(other); }

PeerMemory& PeerMemory::operator=(PeerMemory&& other) noexcept {
  std::swap(own_, other.own_);
  std::swap(bytes_, other.bytes_);
  std::swap(rank_, other.rank_);
  std::swap(opened_, other.opened_);
  std::swap(begins_, other.begins_);
  return *this;
}

PeerMemory::~PeerMemory() { Close(); }

void PeerMemory::Close() {
  for (void* memory : opened_) {
    if (memory != nullptr) (void)cudaIpcCloseMemHandle(memory);
  }
  opened_.clear();
}

Result PeerMemory::Create(Communicator* communicator, void* memory, int64_t bytes, cudaStream_t stream,
                          PeerMemory* peers) {
  PeerMemory made;
  made.own_ = static_cast<const char*>(memory);
  made.bytes_ = bytes;
  made.rank_ = communicator->rank();
  const Told own = Describe(memory);
  int64_t all_reached = 1;
  for (int rank = 0; rank < communicator->size(); ++rank) {
    // The sum of one rank's words and of zeros.
    Told told = rank == made.rank_ ? own : Told{};
    LOSSD_CUDA_PASS_ON(FromCollectives(communicator->AllReduce(Reduction::kSum, told, stream)));
    void* opened = nullptr;
    cudaIpcMemHandle_t handle{};
    std::memcpy(&handle, told.data(), sizeof(handle));
    if (told[kHandleWords + 1] == 0 ||
        (rank != made.rank_ &&
         cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess)) {
      (void)cudaGetLastError();
      all_reached = 0;
    }
    made.opened_.push_back(opened);
    made.begins_.push_back(told[kHandleWords]);
  }
  LOSSD_CUDA_PASS_ON(
      FromCollectives(communicator->AllReduce(Reduction::kMin, std::span(&all_reached, 1), stream)));
  if (all_reached == 0) made.Close();
  *peers = std::move(made);
  return {};
}

bool PeerMemory::Has(const void* place) const {
  const auto* byte = static_cast<const char*>(place);
  return byte >= own_ && byte < own_ + bytes_;
}

void* PeerMemory::At(int rank, const void* place) const {
  if (opened_.empty() || !Has(place)) return nullptr;
  if (rank == rank_) return const_cast<void*>(place);
  const auto at = static_cast<size_t>(rank);
  return static_cast<char*>(opened_[at]) + begins_[at] + (static_cast<const char*>(place) - own_);
}

Result SetFlag(cudaStream_t stream, void* flag, uint32_t value) {
  static decltype(&cuStreamWriteValue32) write = nullptr;
  LOSSD_CUDA_PASS_ON(Find("cuStreamWriteValue32", 12000, &write));
  if (write(stream, reinterpret_cast<CUdeviceptr>(flag), value, CU_STREAM_WRITE_VALUE_DEFAULT) !=
      CUDA_SUCCESS) {
    return {cudaErrorInvalidValue, "cuStreamWriteValue32"};
  }
  return {};
}

Result AwaitFlag(cudaStream_t stream, void* flag, uint32_t value) {
  static decltype(&cuStreamWaitValue32) wait = nullptr;
  LOSSD_CUDA_PASS_ON(Find("cuStreamWaitValue32", 12000, &wait));
  if (wait(stream, reinterpret_cast<CUdeviceptr>(flag), value, CU_STREAM_WAIT_VALUE_GEQ) != CUDA_SUCCESS) {
    return {cudaErrorInvalidValue, "cuStreamWaitValue32"};
  }
  return {};
}

}  // namespace lossd::kernels::cuda
