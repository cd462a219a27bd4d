#include "server/engine/cuda_pipeline.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/rounding.h"
#include "server/engine/cuda_status.h"
#include "server/engine/staging.h"

namespace lossd::engine {
namespace {

using kernels::cuda::DeviceBuffer;
using kernels::cuda::Event;
using kernels::cuda::PinnedBuffer;
using kernels::cuda::Result;
using kernels::cuda::Stream;

constexpr int64_t Align(int64_t bytes) { return kernels::RoundUp(bytes, 256); }

// Whether everything before the event is done.
Result Happened(const Event& event, bool* happened) {
  const cudaError_t code = cudaEventQuery(event.get());
  *happened = code == cudaSuccess;
  if (code != cudaErrorNotReady) return {code, "a batch on the device"};
  (void)cudaGetLastError();  // not to be found by the next launch that looks for its own
  return {};
}

// Whether the device copies from or to this memory rather than the host.
bool IsDirect(MemoryPlace place, int64_t bytes) {
  return place == MemoryPlace::kDevice ||
         (place == MemoryPlace::kRegisteredHost && bytes >= kLeastStagedBytes);
}

int64_t HiddenBytes(const CudaSlot& slot, const ChunkRows& chunk) {
  return chunk.tokens * slot.hidden_row_bytes;
}
int64_t InputGradientBytes(const CudaSlot& slot, const ChunkRows& chunk) {
  return chunk.tokens * slot.dx_row_bytes;
}

char* At(void* memory, int64_t offset) { return static_cast<char*>(memory) + offset; }

Result CopyAsync(void* to, const void* from, int64_t bytes, const Stream& stream) {
  if (bytes == 0) return {};
  // Either may be memory of the device.
  LOSSD_CUDA_TRY(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream.get()));
  return {};
}

// From pinned memory to where the chunks want them.
void HandOut(const CudaSlot& slot) {
  if (slot.callbacks.on_times) {
    const absl::Time now = absl::Now();
    slot.callbacks.on_times(
        {.input_ready = slot.arrived_at.value_or(now), .computed = slot.ready_at.value_or(now)});
  }
  const auto* out = static_cast<const char*>(slot.pinned_out.data());
  const char* losses = out + slot.layout.losses;
  const char* dx = out + slot.layout.dx;
  for (size_t i = 0; i < slot.chunks.size(); ++i) {
    const ChunkRows& chunk = slot.chunks[i];
    const int64_t loss_bytes = chunk.tokens * static_cast<int64_t>(sizeof(float));
    std::memcpy(chunk.losses, losses, static_cast<size_t>(loss_bytes));
    losses += loss_bytes;
    const int64_t dx_bytes = InputGradientBytes(slot, chunk);
    if (dx_bytes > 0 && !IsDirect(chunk.dx_place, dx_bytes)) {
      std::memcpy(chunk.dx, dx, static_cast<size_t>(dx_bytes));
    }
    dx += dx_bytes;
    slot.callbacks.on_input_gradients(i);
  }
}

}  // namespace

SlotLayout SlotLayout::Of(int64_t tokens, int64_t hidden_bytes, int64_t dx_bytes) {
  SlotLayout layout;
  const int64_t array = Align(tokens * 4);
  layout.batch_rows = Align(hidden_bytes);
  layout.labels = layout.batch_rows + array;
  layout.gradient_scales = layout.labels + array;
  layout.shares = layout.gradient_scales + array;
  layout.by_label = layout.shares + array;
  layout.in_bytes = layout.by_label + array;
  layout.rows_redone = array;
  layout.dx = layout.rows_redone + Align(sizeof(int32_t));
  layout.out_bytes = layout.dx + Align(dx_bytes);
  return layout;
}

Result CudaPipeline::Create(const Capacity& capacity) {
  capacity_ = capacity;
  const SlotLayout most = SlotLayout::Of(capacity.tokens, capacity.hidden_bytes, capacity.dx_bytes);
  for (CudaSlot& slot : slots_) LOSSD_CUDA_PASS_ON(CreateSlot(most, &slot));
  for (Stream* stream : {&copying_, &computing_, &returning_}) LOSSD_CUDA_PASS_ON(Stream::Create(stream));
  return {};
}

Result CudaPipeline::CreateSlot(const SlotLayout& most, CudaSlot* slot) {
  LOSSD_CUDA_PASS_ON(PinnedBuffer::Create(most.in_bytes, &slot->pinned_in));
  LOSSD_CUDA_PASS_ON(PinnedBuffer::Create(most.out_bytes, &slot->pinned_out));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(most.in_bytes, &slot->in));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(most.out_bytes, &slot->out));
  for (Event* event : {&slot->arrived, &slot->ready, &slot->computed, &slot->left}) {
    LOSSD_CUDA_PASS_ON(Event::Create(event));
  }
  return {};
}

int64_t CudaPipeline::device_bytes() const {
  int64_t bytes = 0;
  for (const CudaSlot& slot : slots_) bytes += slot.in.bytes() + slot.out.bytes();
  return bytes;
}

CudaSlot& CudaPipeline::Begin(const RowKind& kind, std::span<const ChunkRows> chunks, int64_t hidden_size,
                              BatchCallbacks callbacks) {
  CudaSlot& slot = slots_[(oldest_ + under_way_++) % kSlots];
  int64_t tokens = 0;
  for (const ChunkRows& chunk : chunks) tokens += chunk.tokens;
  slot.hidden_row_bytes = hidden_size * kernels::SizeOf(kind.hidden_type);
  slot.dx_row_bytes = kind.mode == ComputeMode::kLossOnly ? 0 : hidden_size * kernels::SizeOf(kind.dx_type);
  slot.layout = SlotLayout::Of(tokens, tokens * slot.hidden_row_bytes, tokens * slot.dx_row_bytes);
  slot.chunks.assign(chunks.begin(), chunks.end());
  slot.callbacks = std::move(callbacks);
  slot.adds = std::any_of(chunks.begin(), chunks.end(), [](const ChunkRows& chunk) {
    return chunk.accumulate == ChunkRows::Accumulate::kYes;
  });
  slot.answered = false;
  slot.arrived_at.reset();
  slot.ready_at.reset();
  if (slot.layout.in_bytes > slot.in.bytes() || slot.layout.out_bytes > slot.out.bytes()) {
    Fail({cudaErrorInvalidValue, "a batch within the limits"});
  }
  return slot;
}

bool CudaPipeline::CopiesItself(const CudaSlot& slot, const ChunkRows& chunk) {
  return IsDirect(chunk.hidden_place, HiddenBytes(slot, chunk));
}

Result CudaPipeline::CopyIn(const CudaSlot& slot, int64_t zeros) {
  int64_t copied = 0;
  int64_t offset = slot.layout.hidden_states;
  const auto copy_before = [&](int64_t end) {
    return CopyAsync(At(slot.in.data(), copied), At(slot.pinned_in.data(), copied), end - copied, copying_);
  };
  for (const ChunkRows& chunk : slot.chunks) {
    const int64_t bytes = HiddenBytes(slot, chunk);
    if (CopiesItself(slot, chunk)) {
      LOSSD_CUDA_PASS_ON(copy_before(offset));
      LOSSD_CUDA_PASS_ON(CopyAsync(At(slot.in.data(), offset), chunk.hidden_states, bytes, copying_));
      copied = offset + bytes;
    }
    offset += bytes;
  }
  LOSSD_CUDA_PASS_ON(copy_before(slot.layout.in_bytes));
  LOSSD_CUDA_TRY(cudaMemsetAsync(slot.out.data(), 0, static_cast<size_t>(zeros), copying_.get()));
  LOSSD_CUDA_TRY(cudaEventRecord(slot.arrived.get(), copying_.get()));
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(computing_.get(), slot.arrived.get()));
  return {};
}

Result CudaPipeline::CopyOut(const CudaSlot& slot) {
  LOSSD_CUDA_TRY(cudaEventRecord(slot.computed.get(), computing_.get()));
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(returning_.get(), slot.ready.get()));
  int64_t copied = 0;
  int64_t offset = slot.layout.dx;
  const auto copy_before = [&](int64_t end) {
    return CopyAsync(At(slot.pinned_out.data(), copied), At(slot.out.data(), copied), end - copied,
                     returning_);
  };
  for (const ChunkRows& chunk : slot.chunks) {
    const int64_t bytes = InputGradientBytes(slot, chunk);
    if (bytes > 0 && IsDirect(chunk.dx_place, bytes)) {
      LOSSD_CUDA_PASS_ON(copy_before(offset));
      LOSSD_CUDA_PASS_ON(CopyAsync(chunk.dx, At(slot.out.data(), offset), bytes, returning_));
      copied = offset + bytes;
    }
    offset += bytes;
  }
  LOSSD_CUDA_PASS_ON(copy_before(slot.layout.out_bytes));
  LOSSD_CUDA_TRY(cudaEventRecord(slot.left.get(), returning_.get()));
  return {};
}

void CudaPipeline::Fail(const Result& failure) {
  if (failure_.ok()) failure_ = failure;
}

Result CudaPipeline::Look(CudaSlot& slot, bool* done) {
  if (!slot.answered) {
    bool left = false;
    LOSSD_CUDA_PASS_ON(Happened(slot.left, &left));
    if (!left) return {};
    slot.answered = true;
    HandOut(slot);
  }
  return Happened(slot.computed, done);
}

void CudaPipeline::NoteTimes(CudaSlot& slot) {
  if (!slot.callbacks.on_times) return;
  for (auto [event, time] : {std::pair{&slot.arrived, &slot.arrived_at}, {&slot.ready, &slot.ready_at}}) {
    bool happened = false;
    if (!time->has_value() && Happened(*event, &happened).ok() && happened) *time = absl::Now();
  }
}

void CudaPipeline::Poll() {
  for (size_t i = 0; i < under_way_ && failure_.ok(); ++i) NoteTimes(slots_[(oldest_ + i) % kSlots]);
  while (under_way_ > 0) {
    CudaSlot& slot = slots_[oldest_];
    bool done = false;
    if (failure_.ok()) failure_ = Look(slot, &done);
    if (failure_.ok() && !done) return;  // those behind it are done later
    BatchReport report;
    if (failure_.ok()) {
      int32_t redone = 0;
      std::memcpy(&redone, static_cast<const char*>(slot.pinned_out.data()) + slot.layout.rows_redone,
                  sizeof(redone));
      report.rows_redone = redone;
    }
    const BatchCallbacks callbacks = std::exchange(slot.callbacks, {});
    oldest_ = (oldest_ + 1) % kSlots;
    --under_way_;
    if (failure_.ok()) {
      callbacks.on_done(report);
    } else {
      callbacks.on_done(DeviceFailed(failure_));
    }
  }
}

}  // namespace lossd::engine
