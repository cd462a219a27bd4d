#include "server/engine/device/cuda/cuda_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/nccl_communicator.h"
#include "kernels/cuda/optimizer/blend.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/rounding.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/cuda/cuda_backend.h"
#include "server/engine/device/cuda/cuda_pipeline.h"
#include "server/engine/device/cuda/cuda_region.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/cuda/pinned_pool.h"
#include "server/engine/device/rank_status.h"

namespace lossd::engine {
namespace {

using kernels::DataType;
using kernels::cuda::CublasLt;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::Path;
using kernels::cuda::Result;

// What a slot has room for even if chunks are smaller: 4096 rows of 4096 elements in 16 bits.
constexpr int64_t kGatheredBytes = int64_t{32} << 20;
// Chunks are gathered, so small ones cost no passes over dW, and the copies overlap more.
constexpr int64_t kPreferredChunkBytes = int64_t{2} << 20;

// NCCL takes seconds where there are many GPUs, or hosts.
constexpr std::chrono::milliseconds kConnecting = std::chrono::seconds(30);
// The most that NCCL takes: the device does nothing else while replicas exchange. The sum of two H200s
// took 8.4 ms with as many as NCCL likes, 7.4 with these.
constexpr int kBlocksBetweenReplicas = 64;

class CudaDevice : public Device {
 public:
  explicit CudaDevice(const CudaOptions& options) : options_(options) {}

  Result Create(int index) {
    const ChunkLimits& limits = options_.chunk_limits;
    SharedCuda& d = shared_;
    d.index = index;
    LOSSD_CUDA_TRY(cudaSetDevice(index));
    LOSSD_CUDA_TRY(cudaGetDeviceProperties(&properties_, index));
    LOSSD_CUDA_PASS_ON(kernels::cuda::BestPath(DataType::kBFloat16, &path_));
    if (options_.path == CudaPath::kPortable) path_ = Path::kPortable;
    (void)CublasLt::Open(&d.library, &d.why_no_library);
    const auto whole = static_cast<int64_t>(properties_.totalGlobalMem);
    d.workspace_bytes = options_.workspace_bytes > 0
                            ? options_.workspace_bytes
                            : std::min(kernels::kDefaultCudaWorkspaceBytes, whole / 4);
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(d.workspace_bytes, &d.workspace));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(TallyBytes(), &d.tallies));
    LOSSD_CUDA_PASS_ON(kernels::cuda::Stream::Create(&probe_stream_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(int32_t), &probed_));
    CudaPipeline::Capacity capacity;
    capacity.tokens = std::max(limits.max_chunk_tokens, LinearCrossEntropy::kMostTileRows);
    capacity.hidden_bytes = std::max(limits.max_chunk_bytes, kGatheredBytes);
    // dX may be fp32 where hidden states were 16 bits.
    capacity.dx_bytes = std::max(2 * limits.max_chunk_bytes, kGatheredBytes);
    LOSSD_CUDA_PASS_ON(d.pipeline.Create(capacity));
    LOSSD_CUDA_PASS_ON(PinnedPool::Create(options_.pinned_bytes, &pinned_));
    LOSSD_CUDA_PASS_ON(LoadCode());
    size_t free = 0;
    size_t total = 0;
    LOSSD_CUDA_TRY(cudaMemGetInfo(&free, &total));
    // A tenth stays with the driver, for modules and local memory.
    available_ = static_cast<int64_t>(free) / 10 * 9 + SharedBytes();
    return {};
  }

  std::string name() const override { return absl::StrCat("cuda:", shared_.index); }
  std::string description() const override {
    return absl::StrCat(properties_.name, ", ", properties_.totalGlobalMem >> 20, " MiB, compute capability ",
                        properties_.major, ".", properties_.minor);
  }
  std::string pci_bus_id() const override {
    return absl::StrFormat("%08x:%02x:%02x.0", properties_.pciDomainID, properties_.pciBusID,
                           properties_.pciDeviceID);
  }
  int64_t AvailableMemory() const override { return available_; }
  DeviceTotals Totals() const override {
    size_t free = 0;
    size_t total = 0;
    if (cudaSetDevice(shared_.index) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess) {
      return {};
    }
    return {static_cast<int64_t>(total), static_cast<int64_t>(free)};
  }
  absl::Status RoundTrip() override { return DeviceFailed(Probe()); }

  bool HasFixedSegments(const HeadConfig& config) const override {
    const absl::StatusOr<Path> path = PathOf(config);
    if (!path.ok() || *path != Path::kHopper) return false;
    const LinearCrossEntropy::Shape shape{config.vocab_size, config.hidden_size, config.weight_type};
    const HeadShard whole = HeadShard::Whole(config.vocab_size);
    return LinearCrossEntropy::RowsWithin(shape, whole.For(kernels::Segments::kFixed),
                                          shared_.workspace_bytes) > 0;
  }
  bool SpreadsHeads() const override { return path_ == Path::kHopper; }
  absl::Status JoinRanks(kernels::collectives::Communicator* communicator) override;
  absl::StatusOr<std::shared_ptr<ReplicaConnection>> ConnectReplicas(
      const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous) override;

  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return PlanShard(config, HeadShard::Whole(config.vocab_size));
  }
  absl::StatusOr<MemoryPlan> PlanShard(const HeadConfig& config, const HeadShard& shard) const override;

  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    return CreateShard(config, HeadShard::Whole(config.vocab_size));
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateShard(const HeadConfig& config,
                                                           const HeadShard& shard) override {
    const absl::StatusOr<Path> path = PathOf(config);
    if (!path.ok()) return path.status();
    auto backend = std::make_unique<CudaBackend>(config, shard, &shared_, *path);
    if (const Result result = backend->Allocate(); !result.ok()) {
      if (result.code() != cudaErrorMemoryAllocation) return DeviceFailed(result);
      (void)cudaGetLastError();  // memory that is not there is no failure of the device
      backend.reset();
      return DoesNotFit(config, shard, result);
    }
    return backend;
  }

  MemoryPlan PlanGradient(const HeadConfig& config) const override {
    return {{"gradient", CudaGradient::PlanBytes(config), MemoryPlace::kDevice}};
  }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& config) override {
    auto gradient = std::make_unique<CudaGradient>();
    Result result(cudaSetDevice(shared_.index), "cudaSetDevice");
    if (result.ok()) result = CudaGradient::Create(config, gradient.get());
    if (result.ok()) return gradient;
    if (result.code() != cudaErrorMemoryAllocation) return DeviceFailed(result);
    (void)cudaGetLastError();  // memory that is not there is no failure of the device
    return MakeError(
        absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "deterministic",
        absl::StrCat("a gradient of head ", config.name, " needs ", CudaGradient::PlanBytes(config),
                     " bytes of ", name(), ": ", result.message()));
  }

  int64_t PreferredChunkBytes() const override { return kPreferredChunkBytes; }
  MemoryPlan SharedMemory() const override { return {{"workspace", SharedBytes(), MemoryPlace::kDevice}}; }

  std::optional<ResultBytes> RegisteredBytes(int64_t bytes) override { return pinned_->Take(bytes); }
  PoolUsage RegisteredUsage() const override { return pinned_->usage(); }
  int64_t RegionBytes(RegionKind kind, int64_t asked) const override {
    return kind == RegionKind::kSystem ? WholePages(asked) : kernels::RoundUp(asked, kDeviceRegionBytes);
  }
  MemoryPlan PlanRegion(RegionKind kind, int64_t bytes) const override {
    if (kind == RegionKind::kSystem) return {};  // the host's
    return {{"regions", bytes, MemoryPlace::kDevice}};
  }
  absl::StatusOr<std::shared_ptr<RegionMemory>> CreateRegionMemory(RegionKind kind, int64_t bytes) override {
    if (kind == RegionKind::kSystem) return CreateCudaHostRegion(shared_.index, bytes);
    return CreateCudaDeviceRegion(shared_.index, bytes);
  }

  int64_t MostBatches() const override { return CudaPipeline::kSlots; }
  int64_t BatchesUnderWay() const override { return shared_.pipeline.under_way(); }
  void Poll() override { shared_.pipeline.Poll(); }

 private:
  int64_t SharedBytes() const {
    return shared_.workspace.bytes() + shared_.tallies.bytes() + shared_.pipeline.device_bytes();
  }

  // What all heads run: nothing is left to be loaded when a batch comes.
  Result LoadCode() const {
    for (const DataType type : kernels::kDataTypes) {
      LOSSD_CUDA_PASS_ON(kernels::cuda::LoadKernels(type));
      LOSSD_CUDA_PASS_ON(kernels::cuda::LoadOptimizerKernels(type));
      LOSSD_CUDA_PASS_ON(kernels::cuda::LoadBlendKernels(type));
    }
    // The driver's own kernels, which clear long and short pieces of memory.
    void* workspace = shared_.workspace.data();
    LOSSD_CUDA_TRY(cudaMemset(workspace, 0, static_cast<size_t>(shared_.workspace_bytes)));
    LOSSD_CUDA_TRY(cudaMemset(workspace, 0, sizeof(int32_t)));
    constexpr size_t kPitch = 64;
    LOSSD_CUDA_TRY(cudaMemset2D(workspace, kPitch, 0, sizeof(int32_t), 2));
    LOSSD_CUDA_TRY(cudaStreamSynchronize(nullptr));
    return {};
  }

  // Unless one row fits the workspace.
  absl::Status CheckRoomForRow(const HeadConfig& config, const HeadShard& shard, Path path) const;
  absl::Status DoesNotFit(const HeadConfig& config, const HeadShard& shard, const Result& result) const {
    size_t free = 0;
    size_t total = 0;
    (void)cudaMemGetInfo(&free, &total);
    const MemoryPlan plan = CudaBackend::PlanMemory(config, shard, PathOf(config).value_or(path_));
    const auto item = [](std::string* out, const MemoryItem& one) {
      absl::StrAppend(out, one.purpose, " ", one.bytes);
    };
    return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "config",
                     absl::StrCat("head ", config.name, " needs ", TotalBytes(plan), " bytes of ", name(),
                                  " (", absl::StrJoin(plan, ", ", item), "); ", free, " of ", total,
                                  " are free: ", result.message()));
  }

  absl::StatusOr<Path> PathOf(const HeadConfig& config) const {
    Path path = Path::kPortable;
    Result result(cudaSetDevice(shared_.index), "cudaSetDevice");
    if (result.ok()) result = kernels::cuda::BestPath(config.weight_type, &path);
    if (!result.ok()) return DeviceFailed(result);
    if (options_.path == CudaPath::kPortable) path = Path::kPortable;
    if (path == Path::kPortable && shared_.library == nullptr) {
      return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kDtype, "weight_dtype",
                       absl::StrCat("heads of ", kernels::Name(config.weight_type),
                                    " on this device need cuBLAS: ", shared_.why_no_library));
    }
    return path;
  }

  kernels::cuda::Result Join(kernels::collectives::Communicator* communicator);
  Result Probe() const;

  const CudaOptions options_;
  Path path_ = Path::kPortable;  // of heads in 16 bits
  SharedCuda shared_;
  kernels::cuda::Stream probe_stream_;  // beside everything else; any thread's
  DeviceBuffer probed_;
  std::shared_ptr<PinnedPool> pinned_;
  cudaDeviceProp properties_{};
  int64_t available_ = 0;
};

// Ranks cut a batch into the same tiles, which follow from the workspace and the multiprocessors.
absl::StatusOr<std::shared_ptr<ReplicaConnection>> CudaDevice::ConnectReplicas(
    const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous) {
  absl::StatusOr<std::unique_ptr<kernels::collectives::Communicator>> host =
      ConnectReplicaHosts(network, rendezvous);
  if (!host.ok()) return host.status();
  std::unique_ptr<kernels::collectives::Communicator> device;
  const absl::Status connected = ToStatus(
      kernels::collectives::ConnectNccl({.rank = network.place.replica,
                                         .size = network.place.replicas,
                                         .device = shared_.index,
                                         .timeout = network.timeout,
                                         .connect_timeout = std::max(network.connect_timeout, kConnecting),
                                         .least_blocks = kBlocksBetweenReplicas,
                                         .interface = network.interface},
                                        rendezvous, &device));
  if (!connected.ok()) return connected;
  return OwningConnection(*std::move(host), std::move(device));
}

absl::Status CudaDevice::JoinRanks(kernels::collectives::Communicator* communicator) {
  using kernels::collectives::Reduction;
  if (const Result current(cudaSetDevice(shared_.index), "cudaSetDevice"); !current.ok()) {
    return DeviceFailed(current);
  }
  std::array<int64_t, 3> least = {path_ == Path::kHopper ? 1 : 0, properties_.multiProcessorCount,
                                  shared_.workspace_bytes};
  int64_t most = properties_.multiProcessorCount;
  kernels::collectives::Result agreed = communicator->AllReduce(Reduction::kMin, least, nullptr);
  if (agreed.ok()) agreed = communicator->AllReduce(Reduction::kMax, std::span(&most, 1), nullptr);
  if (!agreed.ok()) return ToStatus(agreed);
  if (least[0] == 0) return NoShards();
  if (least[1] != most) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kOption, "devices",
                     absl::StrCat("the GPUs of a group must be of one kind: ", name(), " is ", description(),
                                  ", and they have ", least[1], " to ", most, " multiprocessors"));
  }
  shared_.workspace_bytes = least[2];
  return DeviceFailed(Join(communicator), communicator);
}

Result CudaDevice::Join(kernels::collectives::Communicator* communicator) {
  LOSSD_CUDA_PASS_ON(kernels::cuda::ShardStreams::Create(&shared_.shard_streams));
  LOSSD_CUDA_PASS_ON(
      shared_.shard_streams.Share(communicator, shared_.workspace.data(), shared_.workspace_bytes));
  return shared_.pipeline.JoinRanks(communicator);
}

// A few bytes that nobody writes come over, whatever else the device does.
Result CudaDevice::Probe() const {
  int32_t copied = 0;
  LOSSD_CUDA_TRY(cudaSetDevice(shared_.index));
  LOSSD_CUDA_TRY(
      cudaMemcpyAsync(&copied, probed_.data(), sizeof(copied), cudaMemcpyDeviceToHost, probe_stream_.get()));
  LOSSD_CUDA_TRY(cudaStreamSynchronize(probe_stream_.get()));
  return {};
}

absl::StatusOr<MemoryPlan> CudaDevice::PlanShard(const HeadConfig& config, const HeadShard& shard) const {
  absl::StatusOr<Path> path = PathOf(config);
  if (!path.ok()) return path.status();
  if (!shard.whole() && *path != Path::kHopper) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kDtype, "weight_dtype",
                     absl::StrCat("heads of ", kernels::Name(config.weight_type),
                                  " cannot be spread over several GPUs; bf16 and fp16 can"));
  }
  if (absl::Status room = CheckRoomForRow(config, shard, *path); !room.ok()) return room;
  return CudaBackend::PlanMemory(config, shard, *path);
}

absl::Status CudaDevice::CheckRoomForRow(const HeadConfig& config, const HeadShard& shard, Path path) const {
  const LinearCrossEntropy::Shape shape{config.vocab_size, config.hidden_size, config.weight_type};
  const kernels::Shard rows = shard.For(kernels::Segments::kOfRanks);
  const int64_t fit = shard.whole() ? LinearCrossEntropy::RowsWithin(shape, path, shared_.workspace_bytes)
                                    : LinearCrossEntropy::RowsWithin(shape, rows, shared_.workspace_bytes);
  if (fit > 0) return absl::OkStatus();
  const int64_t bytes = shard.whole() ? LinearCrossEntropy::WorkspaceBytes(shape, path, 1)
                                      : LinearCrossEntropy::WorkspaceBytes(shape, rows, 1);
  return MakeError(
      absl::StatusCode::kInvalidArgument, RejectReason::kShape, "vocab_size",
      absl::StrCat("one row of vocab_size ", shard.layout.vocab(), " needs a workspace of ", bytes,
                   " bytes, the device has ", shared_.workspace_bytes, "; raise --workspace_bytes"));
}

}  // namespace

int CudaDeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int index, const CudaOptions& options) {
  int count = 0;
  if (const Result result(cudaGetDeviceCount(&count), "cudaGetDeviceCount"); !result.ok() || count == 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kInternal, "device",
                     absl::StrCat("cuda:", index, ": no CUDA device can be used here (",
                                  result.ok() ? "the driver knows of none" : result.message(), ")"));
  }
  if (index >= count) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, RejectReason::kInternal, "device",
        absl::StrCat("cuda:", index, ": there are ", count, " CUDA devices, the last is cuda:", count - 1));
  }
  auto device = std::make_unique<CudaDevice>(options);
  if (const Result result = device->Create(index); !result.ok()) {
    return ToStatus(result.code() == cudaErrorMemoryAllocation ? absl::StatusCode::kResourceExhausted
                                                               : absl::StatusCode::kFailedPrecondition,
                    result);
  }
  return device;
}

}  // namespace lossd::engine
