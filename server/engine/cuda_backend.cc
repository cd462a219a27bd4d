#include "server/engine/cuda_backend.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/owners.h"
#include "kernels/cuda/portable/cublas_lt.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

using kernels::DataType;
using kernels::SizeOf;
using kernels::cuda::CublasLt;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::Event;
using kernels::cuda::LinearCrossEntropy;
using kernels::cuda::PaddedHidden;
using kernels::cuda::Path;
using kernels::cuda::PinnedBuffer;
using kernels::cuda::Result;
using kernels::cuda::Stream;

constexpr int64_t kWorkspaceBytes = int64_t{5} << 28;  // 1.25 GiB: 4096 rows of 131072 entries in 16 bits

absl::Status ToStatus(absl::StatusCode code, const Result& result) {
  if (result.ok()) return absl::OkStatus();
  return MakeError(code, RejectReason::kInternal, "device", result.message());
}
absl::Status DeviceFailed(const Result& result) { return ToStatus(absl::StatusCode::kInternal, result); }

// Pinned and device memory for one batch on its way. What a batch's last product still reads belongs to its
// slot until `free` has happened; two slots let the next batch come in meanwhile.
struct Slot {
  PinnedBuffer pinned_in;
  PinnedBuffer pinned_out;
  DeviceBuffer in;
  DeviceBuffer out;
  Event arrived;  // on the copying stream: `in` is there
  Event ready;    // on the computing stream: `out` is final
  Event left;     // on the returning stream: `pinned_out` is there
  Event free;     // on the computing stream: nothing of the batch is under way any more
};

// Where the parts of a batch lie in a slot, in bytes. Everything is 256-byte aligned.
struct SlotLayout {
  int64_t hidden_states = 0;
  int64_t batch_rows = 0;
  int64_t labels = 0;
  int64_t gradient_scales = 0;
  int64_t by_label = 0;
  int64_t in_bytes = 0;
  int64_t losses = 0;
  int64_t rows_redone = 0;
  int64_t dx = 0;
  int64_t out_bytes = 0;
};

constexpr int64_t Align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

SlotLayout LayOut(int64_t tokens, int64_t hidden_bytes, int64_t dx_bytes) {
  SlotLayout layout;
  const int64_t array = Align(tokens * 4);
  layout.batch_rows = Align(hidden_bytes);
  layout.labels = layout.batch_rows + array;
  layout.gradient_scales = layout.labels + array;
  layout.by_label = layout.gradient_scales + array;
  layout.in_bytes = layout.by_label + array;
  layout.rows_redone = array;
  layout.dx = layout.rows_redone + Align(sizeof(int32_t));
  layout.out_bytes = layout.dx + Align(dx_bytes);
  return layout;
}

// What heads of one device share.
struct SharedDevice {
  int index = 0;
  int64_t workspace_bytes = 0;
  DeviceBuffer workspace;
  std::array<Slot, 2> slots;
  size_t next_slot = 0;
  Stream copying;
  Stream computing;
  Stream returning;
  std::unique_ptr<CublasLt> library;  // null if it is not there
  std::string why_no_library;
};

class CudaBackend : public HeadBackend {
 public:
  CudaBackend(HeadConfig config, SharedDevice* device, Path path)
      : config_(std::move(config)),
        device_(device),
        padded_hidden_(PaddedHidden(config_.hidden_size)),
        shape_{config_.vocab_size, config_.hidden_size, config_.weight_type},
        step_(shape_, path, LinearCrossEntropy::RowsWithin(shape_, path, device->workspace_bytes),
              device->workspace.data(), device->library.get()) {}

  ~CudaBackend() override { (void)cudaStreamSynchronize(device_->computing.get()); }

  Result Allocate() {
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config_.vocab_size * WeightRowBytes(), &weights_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(config_.vocab_size * GradientRowBytes(), &gradient_));
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(sizeof(float), &weight_largest_));
    LOSSD_CUDA_TRY(
        cudaMemset(weights_.data(), 0, static_cast<size_t>(weights_.bytes())));  // the padding stays so
    // The device's own streams do not wait for the one that this went to.
    LOSSD_CUDA_TRY(cudaStreamSynchronize(nullptr));
    return {};
  }

  absl::Status PublishWeights(HostBuffer staged) override { return DeviceFailed(Publish(staged)); }

  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, DataType type, void* out) override {
    const int64_t row_bytes = config_.hidden_size * SizeOf(config_.weight_type);
    std::vector<char> narrow(static_cast<size_t>(rows * row_bytes));
    const Result result = ReadRows(weights_, WeightRowBytes(), first_row, rows, row_bytes, narrow.data());
    if (!result.ok()) return DeviceFailed(result);
    kernels::Convert(config_.weight_type, narrow.data(), type, out, rows * config_.hidden_size);
    return absl::OkStatus();
  }

  absl::Status ReadGradientRows(int64_t first_row, int64_t rows, float* out) override {
    if (gradient_empty_) {
      std::fill_n(out, rows * config_.hidden_size, 0.0f);
      return absl::OkStatus();
    }
    const int64_t row_bytes = config_.hidden_size * static_cast<int64_t>(sizeof(float));
    return DeviceFailed(ReadRows(gradient_, GradientRowBytes(), first_row, rows, row_bytes, out));
  }

  void ResetGradient() override { gradient_empty_ = true; }

  MemoryPlan MemoryReport() const override {
    return {{"weights", weights_.bytes()}, {"gradient", gradient_.bytes()}};
  }

  absl::StatusOr<BatchReport> ProcessBatch(const RowBatch& batch,
                                           absl::FunctionRef<void()> on_input_gradients) override {
    BatchReport report;
    if (const Result result = Process(batch, on_input_gradients, &report); !result.ok()) {
      return DeviceFailed(result);
    }
    return report;
  }

 private:
  int64_t WeightRowBytes() const { return padded_hidden_ * SizeOf(config_.weight_type); }
  int64_t GradientRowBytes() const { return padded_hidden_ * static_cast<int64_t>(sizeof(float)); }

  Result Publish(const HostBuffer& staged) {
    LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
    const auto row_bytes = static_cast<size_t>(config_.hidden_size * SizeOf(config_.weight_type));
    cudaStream_t stream = device_->computing.get();  // after every batch that was given the old weights
    LOSSD_CUDA_TRY(cudaMemcpy2DAsync(weights_.data(), static_cast<size_t>(WeightRowBytes()), staged.data(),
                                     row_bytes, row_bytes, static_cast<size_t>(config_.vocab_size),
                                     cudaMemcpyHostToDevice, stream));
    LOSSD_CUDA_PASS_ON(kernels::cuda::LargestMagnitude(config_.weight_type, weights_.data(),
                                                       config_.vocab_size * padded_hidden_,
                                                       static_cast<float*>(weight_largest_.data()), stream));
    LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
    return {};
  }

  Result ReadRows(const DeviceBuffer& buffer, int64_t stride_bytes, int64_t first_row, int64_t rows,
                  int64_t row_bytes, void* out) const {
    LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
    const char* from = static_cast<const char*>(buffer.data()) + first_row * stride_bytes;
    cudaStream_t stream = device_->computing.get();
    LOSSD_CUDA_TRY(cudaMemcpy2DAsync(out, static_cast<size_t>(row_bytes), from,
                                     static_cast<size_t>(stride_bytes), static_cast<size_t>(row_bytes),
                                     static_cast<size_t>(rows), cudaMemcpyDeviceToHost, stream));
    LOSSD_CUDA_TRY(cudaStreamSynchronize(stream));
    return {};
  }

  // The valid rows, with arrays that the device wants. Returns how many there are.
  int64_t FillArrays(const RowBatch& batch, const SlotLayout& layout, char* in) const {
    const kernels::cuda::BatchRows rows = kernels::cuda::ValidRows(
        batch.labels, batch.tokens, batch.ignore_index, batch.gradient_scale, step_.tile_rows());
    const auto bytes = static_cast<size_t>(rows.rows) * sizeof(int32_t);
    std::memcpy(in + layout.batch_rows, rows.batch_rows.data(), bytes);
    std::memcpy(in + layout.labels, rows.labels.data(), bytes);
    std::memcpy(in + layout.by_label, rows.by_label.data(), bytes);
    std::memcpy(in + layout.gradient_scales, rows.gradient_scales.data(), bytes);
    return rows.rows;
  }

  LinearCrossEntropy::Batch Describe(const RowBatch& batch, const SlotLayout& layout, const Slot& slot,
                                     int64_t valid) const {
    const char* in = static_cast<const char*>(slot.in.data());
    char* out = static_cast<char*>(slot.out.data());
    LinearCrossEntropy::Batch step;
    step.rows = valid;
    step.hidden_states = in;
    step.hidden_type = batch.hidden_type;
    step.batch_rows = reinterpret_cast<const int32_t*>(in + layout.batch_rows);
    step.labels = reinterpret_cast<const int32_t*>(in + layout.labels);
    step.gradient_scales = reinterpret_cast<const float*>(in + layout.gradient_scales);
    step.by_label = reinterpret_cast<const int32_t*>(in + layout.by_label);
    step.weight = weights_.data();
    step.weight_largest = static_cast<const float*>(weight_largest_.data());
    step.losses = reinterpret_cast<float*>(out);
    step.rows_redone = reinterpret_cast<int32_t*>(out + layout.rows_redone);
    step.dx_type = batch.dx_type;
    step.dx = batch.dx == nullptr ? nullptr : out + layout.dx;
    if (batch.accumulate == RowBatch::Accumulate::kYes) {
      step.weight_gradient =
          gradient_empty_ ? kernels::WeightGradient::kOverwrite : kernels::WeightGradient::kAccumulate;
      step.dw = static_cast<float*>(gradient_.data());
    }
    return step;
  }

  Result Process(const RowBatch& batch, absl::FunctionRef<void()> on_input_gradients, BatchReport* report) {
    LOSSD_CUDA_TRY(cudaSetDevice(device_->index));
    const int64_t hidden_bytes = batch.tokens * config_.hidden_size * SizeOf(batch.hidden_type);
    const int64_t dx_bytes =
        batch.dx == nullptr ? 0 : batch.tokens * config_.hidden_size * SizeOf(batch.dx_type);
    const SlotLayout layout = LayOut(batch.tokens, hidden_bytes, dx_bytes);
    Slot& slot = device_->slots[device_->next_slot];
    device_->next_slot = 1 - device_->next_slot;
    if (layout.in_bytes > slot.in.bytes() || layout.out_bytes > slot.out.bytes()) {
      return {cudaErrorInvalidValue, "a batch within the limits on chunks"};
    }
    auto* in = static_cast<char*>(slot.pinned_in.data());
    auto* out = static_cast<char*>(slot.pinned_out.data());
    // The copy before last out of this pinned memory was waited for with its batch's answer.
    std::memcpy(in, batch.hidden_states, static_cast<size_t>(hidden_bytes));
    const int64_t valid = FillArrays(batch, layout, in);

    LOSSD_CUDA_TRY(cudaStreamWaitEvent(device_->copying.get(), slot.free.get()));
    LOSSD_CUDA_TRY(cudaMemcpyAsync(slot.in.data(), in, static_cast<size_t>(layout.in_bytes),
                                   cudaMemcpyHostToDevice, device_->copying.get()));
    LOSSD_CUDA_TRY(cudaMemsetAsync(slot.out.data(), 0,
                                   static_cast<size_t>(valid == batch.tokens ? layout.dx : layout.out_bytes),
                                   device_->copying.get()));
    LOSSD_CUDA_TRY(cudaEventRecord(slot.arrived.get(), device_->copying.get()));

    LOSSD_CUDA_TRY(cudaStreamWaitEvent(device_->computing.get(), slot.arrived.get()));
    LOSSD_CUDA_PASS_ON(
        step_.Run(Describe(batch, layout, slot, valid), device_->computing.get(), slot.ready.get()));
    LOSSD_CUDA_TRY(cudaEventRecord(slot.free.get(), device_->computing.get()));

    LOSSD_CUDA_TRY(cudaStreamWaitEvent(device_->returning.get(), slot.ready.get()));
    LOSSD_CUDA_TRY(cudaMemcpyAsync(out, slot.out.data(), static_cast<size_t>(layout.out_bytes),
                                   cudaMemcpyDeviceToHost, device_->returning.get()));
    LOSSD_CUDA_TRY(cudaEventRecord(slot.left.get(), device_->returning.get()));
    LOSSD_CUDA_TRY(cudaEventSynchronize(slot.left.get()));
    std::memcpy(batch.losses, out, static_cast<size_t>(batch.tokens) * sizeof(float));
    if (batch.dx != nullptr) std::memcpy(batch.dx, out + layout.dx, static_cast<size_t>(dx_bytes));
    int32_t redone = 0;
    std::memcpy(&redone, out + layout.rows_redone, sizeof(redone));
    if (batch.accumulate == RowBatch::Accumulate::kYes && valid > 0) gradient_empty_ = false;
    *report = {valid, redone};
    on_input_gradients();
    return {};
  }

  const HeadConfig config_;
  SharedDevice* const device_;
  const int64_t padded_hidden_;
  const LinearCrossEntropy::Shape shape_;
  LinearCrossEntropy step_;
  DeviceBuffer weights_;
  DeviceBuffer gradient_;
  DeviceBuffer weight_largest_;
  bool gradient_empty_ = true;
};

class CudaDevice : public Device {
 public:
  Result Create(int index, int64_t workspace_bytes, const ChunkLimits& limits) {
    SharedDevice& d = shared_;
    d.index = index;
    LOSSD_CUDA_TRY(cudaSetDevice(index));
    LOSSD_CUDA_TRY(cudaGetDeviceProperties(&properties_, index));
    Path path = Path::kPortable;
    LOSSD_CUDA_PASS_ON(kernels::cuda::BestPath(DataType::kBFloat16, &path));
    (void)CublasLt::Open(&d.library, &d.why_no_library);
    const auto whole = static_cast<int64_t>(properties_.totalGlobalMem);
    d.workspace_bytes = workspace_bytes > 0 ? workspace_bytes : std::min(kWorkspaceBytes, whole / 4);
    LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(d.workspace_bytes, &d.workspace));
    // dX may be fp32 where hidden states were 16 bits.
    const SlotLayout most =
        LayOut(limits.max_chunk_tokens, limits.max_chunk_bytes, 2 * limits.max_chunk_bytes);
    for (Slot& slot : d.slots) {
      LOSSD_CUDA_PASS_ON(PinnedBuffer::Create(most.in_bytes, &slot.pinned_in));
      LOSSD_CUDA_PASS_ON(PinnedBuffer::Create(most.out_bytes, &slot.pinned_out));
      LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(most.in_bytes, &slot.in));
      LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(most.out_bytes, &slot.out));
      for (Event* event : {&slot.arrived, &slot.ready, &slot.left, &slot.free}) {
        LOSSD_CUDA_PASS_ON(Event::Create(event));
      }
    }
    for (Stream* stream : {&d.copying, &d.computing, &d.returning}) {
      LOSSD_CUDA_PASS_ON(Stream::Create(stream));
    }
    staging_bytes_ = 2 * (most.in_bytes + most.out_bytes);
    size_t free = 0;
    size_t total = 0;
    LOSSD_CUDA_TRY(cudaMemGetInfo(&free, &total));
    // A tenth stays with the driver, for modules and local memory.
    available_ = static_cast<int64_t>(free) / 10 * 9 + d.workspace_bytes + staging_bytes_;
    return {};
  }

  std::string name() const override { return absl::StrCat("cuda:", shared_.index); }
  std::string description() const override {
    return absl::StrCat(properties_.name, ", ", properties_.totalGlobalMem >> 20, " MiB, compute capability ",
                        properties_.major, ".", properties_.minor);
  }
  int64_t AvailableMemory() const override { return available_; }

  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    absl::StatusOr<Path> path = PathOf(config);
    if (!path.ok()) return path.status();
    const LinearCrossEntropy::Shape shape{config.vocab_size, config.hidden_size, config.weight_type};
    if (LinearCrossEntropy::RowsWithin(shape, *path, shared_.workspace_bytes) == 0) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, RejectReason::kShape, "vocab_size",
          absl::StrCat("one row of vocab_size ", config.vocab_size, " needs a workspace of ",
                       LinearCrossEntropy::WorkspaceBytes(shape, *path, 1), " bytes, the device has ",
                       shared_.workspace_bytes, "; raise --workspace_bytes"));
    }
    const int64_t elements = config.vocab_size * PaddedHidden(config.hidden_size);
    return MemoryPlan{{"weights", elements * SizeOf(config.weight_type)},
                      {"gradient", elements * static_cast<int64_t>(sizeof(float))}};
  }

  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    const absl::StatusOr<Path> path = PathOf(config);
    if (!path.ok()) return path.status();
    auto backend = std::make_unique<CudaBackend>(config, &shared_, *path);
    if (const Result result = backend->Allocate(); !result.ok()) {
      (void)cudaGetLastError();  // memory that is not there is no failure of the device
      return ToStatus(absl::StatusCode::kResourceExhausted, result);
    }
    return backend;
  }

  MemoryPlan SharedMemory() const override {
    return {{"workspace", shared_.workspace_bytes + staging_bytes_}};
  }

 private:
  absl::StatusOr<Path> PathOf(const HeadConfig& config) const {
    Path path = Path::kPortable;
    Result result(cudaSetDevice(shared_.index), "cudaSetDevice");
    if (result.ok()) result = kernels::cuda::BestPath(config.weight_type, &path);
    if (!result.ok()) return DeviceFailed(result);
    if (path == Path::kPortable && shared_.library == nullptr) {
      return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kDtype, "weight_dtype",
                       absl::StrCat("heads of ", kernels::Name(config.weight_type),
                                    " on this device need cuBLAS: ", shared_.why_no_library));
    }
    return path;
  }

  SharedDevice shared_;
  cudaDeviceProp properties_{};
  int64_t staging_bytes_ = 0;
  int64_t available_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int index, int64_t workspace_bytes,
                                                         const ChunkLimits& limits) {
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
  auto device = std::make_unique<CudaDevice>();
  if (const Result result = device->Create(index, workspace_bytes, limits); !result.ok()) {
    return ToStatus(result.code() == cudaErrorMemoryAllocation ? absl::StatusCode::kResourceExhausted
                                                               : absl::StatusCode::kFailedPrecondition,
                    result);
  }
  return device;
}

}  // namespace lossd::engine
