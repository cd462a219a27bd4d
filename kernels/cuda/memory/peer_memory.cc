#include "kernels/cuda/memory/peer_memory.h"

#include <cuda.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <random>
#include <utility>

namespace lossd::kernels::cuda {
namespace {

using collectives::Communicator;
using collectives::Reduction;

// What a rank tells the others of its memory, in words that add up with the zeros of the others.
struct Told {
  cudaIpcMemHandle_t handle{};
  int64_t has_handle = 0;
  int64_t place = 0;  // in the handle's allocation
  // For ranks of the same process.
  int64_t process = 0;
  char* address = nullptr;
};
using Words = std::array<int64_t, sizeof(Told) / sizeof(int64_t)>;
static_assert(sizeof(Words) == sizeof(Told) && std::tuple_size_v<Words> <= Communicator::kMostValues);

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

// A number that no other process has, on no host; one that was forked has another.
int64_t ThisProcess() {
  static const uint32_t drawn = std::random_device()();
  return static_cast<int64_t>((uint64_t{drawn} << 32) | static_cast<uint32_t>(getpid()));
}

Told Describe(void* memory) {
  Told told{.process = ThisProcess(), .address = static_cast<char*>(memory)};
  if (PlaceInAllocation(memory, &told.place).ok() &&
      cudaIpcGetMemHandle(&told.handle, memory) == cudaSuccess) {
    told.has_handle = 1;
  } else {
    (void)cudaGetLastError();  // is not for the next call to report
    told.handle = {};
  }
  return told;
}

// Whether this thread's device reaches that memory of this process.
bool ReachWithin(const void* memory) {
  cudaPointerAttributes attributes{};
  int own = 0;
  int reached = 0;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess || cudaGetDevice(&own) != cudaSuccess) {
    return false;
  }
  if (attributes.device == own) return true;
  if (cudaDeviceCanAccessPeer(&reached, own, attributes.device) != cudaSuccess || reached == 0) return false;
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(attributes.device, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError();
  return enabled == cudaSuccess || enabled == cudaErrorPeerAccessAlreadyEnabled;
}

}  // namespace

PeerMemory::PeerMemory(PeerMemory&& other) noexcept { *this = std::move(other); }

PeerMemory& PeerMemory::operator=(PeerMemory&& other) noexcept {
  std::swap(own_, other.own_);
  std::swap(bytes_, other.bytes_);
  std::swap(rank_, other.rank_);
  std::swap(places_, other.places_);
  std::swap(opened_, other.opened_);
  return *this;
}

PeerMemory::~PeerMemory() { Close(); }

void PeerMemory::Close() {
  for (void* memory : opened_) (void)cudaIpcCloseMemHandle(memory);
  opened_.clear();
  places_.clear();
}

Result PeerMemory::Create(Communicator* communicator, void* memory, int64_t bytes, cudaStream_t stream,
                          PeerMemory* peers, Among among) {
  PeerMemory made;
  made.own_ = static_cast<const char*>(memory);
  made.bytes_ = bytes;
  made.rank_ = communicator->rank();
  const Told own = Describe(memory);
  int64_t all_reached = 1;
  for (int rank = 0; rank < communicator->size(); ++rank) {
    // The sum of one rank's words and of zeros.
    auto words = std::bit_cast<Words>(rank == made.rank_ ? own : Told{});
    LOSSD_CUDA_PASS_ON(FromCollectives(communicator->AllReduce(Reduction::kSum, words, stream)));
    const auto told = std::bit_cast<Told>(words);
    char* place = nullptr;
    if (rank == made.rank_) {
      place = static_cast<char*>(memory);
    } else if (told.process != own.process) {
      place = made.Open(told.handle, told.has_handle != 0, told.place);
    } else if (among == Among::kThreadsToo && ReachWithin(told.address)) {
      place = told.address;
    }
    if (place == nullptr) {
      (void)cudaGetLastError();
      all_reached = 0;
    }
    made.places_.push_back(place);
  }
  LOSSD_CUDA_PASS_ON(
      FromCollectives(communicator->AllReduce(Reduction::kMin, std::span(&all_reached, 1), stream)));
  if (all_reached == 0) made.Close();
  *peers = std::move(made);
  return {};
}

char* PeerMemory::Open(const cudaIpcMemHandle_t& handle, bool there_is_one, int64_t place) {
  void* opened = nullptr;
  if (!there_is_one || cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
    return nullptr;
  }
  opened_.push_back(opened);
  return static_cast<char*>(opened) + place;
}

bool PeerMemory::Has(const void* place) const {
  const auto* byte = static_cast<const char*>(place);
  return byte >= own_ && byte < own_ + bytes_;
}

void* PeerMemory::At(int rank, const void* place) const {
  if (places_.empty() || !Has(place)) return nullptr;
  return places_[static_cast<size_t>(rank)] + (static_cast<const char*>(place) - own_);
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
