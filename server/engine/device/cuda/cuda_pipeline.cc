#include "server/engine/device/cuda/cuda_pipeline.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/rounding.h"
#include "server/engine/device/cuda/cuda_status.h"
#include "server/engine/device/staging.h"

namespace lossd::engine {
namespace {

using kernels::cuda::DeviceBuffer;
using kernels::cuda::Event;
using kernels::cuda::PinnedBuffer;
using kernels::cuda::Result;
using kernels::cuda::Stream;

constexpr int64_t Align(int64_t bytes) { return kernels::RoundUp(bytes, SlotLayout::kAlignment); }

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

// Copies the returns of `tokens` rows, from row `first` on.
void HandOutReturns(const kernels::RowReturns& from, int64_t first, int64_t tokens,
                    const kernels::RowReturns& to) {
  const auto hand_out = [first, tokens](auto* wanted, const auto* values, int64_t width) {
    if (wanted == nullptr || values == nullptr) return;
    std::copy_n(values + first * width, tokens * width, wanted);
  };
  hand_out(to.log_sum_exp, from.log_sum_exp, 1);
  hand_out(to.z_loss, from.z_loss, 1);
  hand_out(to.log_probability, from.log_probability, 1);
  hand_out(to.entropy, from.entropy, 1);
  hand_out(to.prediction, from.prediction, 1);
  hand_out(to.target_rank, from.target_rank, 1);
  hand_out(to.divergence, from.divergence, 1);
  hand_out(to.top_tokens, from.top_tokens, from.top_k);
  hand_out(to.top_log_probabilities, from.top_log_probabilities, from.top_k);
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
  const kernels::RowReturns returns = ReturnsIn(slot.pinned_out.data(), slot.layout, slot.extras.returns);
  int64_t first = 0;
  for (size_t i = 0; i < slot.chunks.size(); ++i) {
    const ChunkRows& chunk = slot.chunks[i];
    const int64_t loss_bytes = chunk.tokens * static_cast<int64_t>(sizeof(float));
    if (chunk.losses != nullptr) std::memcpy(chunk.losses, losses, static_cast<size_t>(loss_bytes));
    losses += loss_bytes;
    HandOutReturns(returns, first, chunk.tokens, chunk.returns);
    first += chunk.tokens;
    const int64_t dx_bytes = InputGradientBytes(slot, chunk);
    if (dx_bytes > 0 && !IsDirect(chunk.dx_place, dx_bytes)) {
      std::memcpy(chunk.dx, dx, static_cast<size_t>(dx_bytes));
    }
    dx += dx_bytes;
    slot.callbacks.on_input_gradients(i);
  }
}

}  // namespace

SlotExtras SlotExtras::Of(const BatchKey& kind, std::span<const ChunkRows> chunks) {
  SlotExtras extras;
  extras.returns = kind.returns;
  extras.entropy_gradients = kind.entropy_gradients;
  extras.held_rows = kind.holds && kind.mode != ComputeMode::kLossOnly;
  for (const ChunkRows& chunk : chunks) {
    extras.z_gradient_scales = extras.z_gradient_scales || chunk.z_gradient_scale.has_value();
    extras.token_weights = extras.token_weights || chunk.token_weights != nullptr;
    extras.lse_gradients = extras.lse_gradients || chunk.lse_gradients != nullptr;
    const bool targets = chunk.target_lists.given();
    const kernels::TokenLists& lists = targets ? chunk.target_lists.lists : chunk.kept_tokens;
    if (!lists.given()) continue;
    extras.lists = targets ? ChunkLists::Use::kTargets : ChunkLists::Use::kKept;
    extras.list_entries += lists.offsets[chunk.tokens];
  }
  return extras;
}

SlotExtras SlotExtras::Most() {
  return {.z_gradient_scales = true,
          .token_weights = true,
          .lse_gradients = true,
          .entropy_gradients = true,
          .held_rows = true,
          .lists = ChunkLists::Use::kKept,  // which take more than targets do
          .list_entries = kMostListedTokens,
          .returns = {.log_sum_exp = true,
                      .z_loss = true,
                      .log_probability = true,
                      .entropy = true,
                      .prediction = true,
                      .target_rank = true,
                      .divergence = true,
                      .top_k = kernels::kMostTopK}};
}

SlotLayout SlotLayout::Of(int64_t tokens, int64_t hidden_bytes, int64_t teacher_bytes, int64_t dx_bytes,
                          const SlotExtras& extras) {
  SlotLayout layout;
  layout.teacher_hidden = Align(hidden_bytes);
  int64_t end = layout.teacher_hidden + Align(teacher_bytes);
  // An array of `width` elements a row.
  const auto take = [&end, tokens](int64_t* offset, int64_t width) {
    *offset = end;
    end += Align(tokens * width * 4);
  };
  for (int64_t* array :
       {&layout.batch_rows, &layout.labels, &layout.gradient_scales, &layout.shares, &layout.by_label}) {
    take(array, 1);
  }
  take(&layout.z_gradient_scales, extras.z_gradient_scales ? 1 : 0);
  take(&layout.token_weights, extras.token_weights ? 1 : 0);
  take(&layout.lse_gradients, extras.lse_gradients ? 1 : 0);
  take(&layout.entropy_gradients, extras.entropy_gradients ? 1 : 0);
  take(&layout.held_rows, extras.held_rows ? 1 : 0);
  const auto take_values = [&end](int64_t* offset, int64_t values) {
    *offset = end;
    end += Align(values * static_cast<int64_t>(sizeof(int32_t)));
  };
  if (extras.lists != ChunkLists::Use::kNone) {
    take_values(&layout.list_offsets, tokens + 1);
    take_values(&layout.list_tokens, extras.list_entries);
  }
  if (extras.lists == ChunkLists::Use::kKept) {
    take_values(&layout.kept_by_token, extras.list_entries);
    // Each tile of a batch has its own, but all of them no more than entries.
    take_values(&layout.kept_token_starts, extras.list_entries + 1);
  }
  const int64_t targets = extras.lists == ChunkLists::Use::kTargets ? extras.list_entries : 0;
  take_values(&layout.target_probabilities, targets);
  layout.in_bytes = end;
  take_values(&layout.target_logits, targets);
  layout.in_room = end;

  end = 0;
  take(&layout.losses, 1);
  layout.rows_redone = end;
  end += Align(sizeof(int32_t));
  const WantedReturns& returns = extras.returns;
  take(&layout.log_sum_exp, returns.log_sum_exp ? 1 : 0);
  take(&layout.z_loss, returns.z_loss ? 1 : 0);
  take(&layout.log_probability, returns.log_probability ? 1 : 0);
  take(&layout.entropy, returns.entropy ? 1 : 0);
  take(&layout.divergence, returns.divergence ? 1 : 0);
  take(&layout.top_log_probabilities, returns.top_k);
  take(&layout.prediction, returns.prediction ? 1 : 0);
  take(&layout.target_rank, returns.target_rank ? 1 : 0);
  take(&layout.top_tokens, returns.top_k);
  layout.dx = end;
  layout.out_bytes = layout.dx + Align(dx_bytes);
  return layout;
}

kernels::RowReturns ReturnsIn(void* out, const SlotLayout& layout, const WantedReturns& returns) {
  const auto floats = [out](bool wanted, int64_t offset) {
    return wanted ? reinterpret_cast<float*>(At(out, offset)) : nullptr;
  };
  const auto integers = [out](bool wanted, int64_t offset) {
    return wanted ? reinterpret_cast<int32_t*>(At(out, offset)) : nullptr;
  };
  const bool top = returns.top_k > 0;
  return {.log_sum_exp = floats(returns.log_sum_exp, layout.log_sum_exp),
          .z_loss = floats(returns.z_loss, layout.z_loss),
          .log_probability = floats(returns.log_probability, layout.log_probability),
          .entropy = floats(returns.entropy, layout.entropy),
          .prediction = integers(returns.prediction, layout.prediction),
          .target_rank = integers(returns.target_rank, layout.target_rank),
          .divergence = floats(returns.divergence, layout.divergence),
          .top_k = returns.top_k,
          .top_tokens = integers(top, layout.top_tokens),
          .top_log_probabilities = floats(top, layout.top_log_probabilities)};
}

Result CudaPipeline::Create(const Capacity& capacity) {
  capacity_ = capacity;
  // A teacher's hidden states share the room of the head's own; what is aligned twice takes a little more.
  const SlotLayout most = SlotLayout::Of(capacity.tokens, capacity.hidden_bytes, SlotLayout::kAlignment,
                                         capacity.dx_bytes, SlotExtras::Most());
  for (CudaSlot& slot : slots_) LOSSD_CUDA_PASS_ON(CreateSlot(most, &slot));
  for (Stream* stream : {&copying_, &computing_, &returning_}) LOSSD_CUDA_PASS_ON(Stream::Create(stream));
  return {};
}

Result CudaPipeline::CreateSlot(const SlotLayout& most, CudaSlot* slot) {
  LOSSD_CUDA_PASS_ON(PinnedBuffer::Create(most.in_bytes, &slot->pinned_in));
  LOSSD_CUDA_PASS_ON(PinnedBuffer::Create(most.out_bytes, &slot->pinned_out));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(most.in_room, &slot->in));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(most.out_bytes, &slot->out));
  for (Event* event : {&slot->arrived, &slot->ready, &slot->computed, &slot->left}) {
    LOSSD_CUDA_PASS_ON(Event::Create(event));
  }
  return {};
}

Result CudaPipeline::JoinRanks(kernels::collectives::Communicator* communicator) {
  communicator_ = communicator;
  LOSSD_CUDA_PASS_ON(shared_rows_.emplace().Create(communicator));
  for (CudaSlot& slot : slots_) {
    LOSSD_CUDA_PASS_ON(shared_rows_->Add(slot.in.data(), slot.in.bytes(), copying_.get()));
  }
  return {};
}

int64_t CudaPipeline::device_bytes() const {
  int64_t bytes = 0;
  for (const CudaSlot& slot : slots_) bytes += slot.in.bytes() + slot.out.bytes();
  return bytes;
}

CudaSlot& CudaPipeline::Begin(const BatchKey& kind, std::span<const ChunkRows> chunks, int64_t hidden_size,
                              BatchCallbacks callbacks) {
  CudaSlot& slot = slots_[(oldest_ + under_way_++) % kSlots];
  int64_t tokens = 0;
  for (const ChunkRows& chunk : chunks) tokens += chunk.tokens;
  slot.hidden_row_bytes = hidden_size * kernels::SizeOf(kind.hidden_type);
  slot.teacher_row_bytes = kind.teacher.backend == nullptr
                               ? 0
                               : kind.teacher.hidden_size * kernels::SizeOf(kind.teacher.hidden_type);
  const bool dx = HasInputGradient(kind.mode);
  slot.dx_row_bytes = dx ? hidden_size * kernels::SizeOf(kind.dx_type) : 0;
  slot.extras = SlotExtras::Of(kind, chunks);
  slot.layout = SlotLayout::Of(tokens, tokens * slot.hidden_row_bytes, tokens * slot.teacher_row_bytes,
                               tokens * slot.dx_row_bytes, slot.extras);
  slot.chunks.assign(chunks.begin(), chunks.end());
  slot.callbacks = std::move(callbacks);
  slot.adds = std::any_of(chunks.begin(), chunks.end(), [](const ChunkRows& chunk) {
    return chunk.accumulate == ChunkRows::Accumulate::kYes;
  });
  slot.report = {};
  slot.holder = kind.holder;
  slot.is_held = communicator_ == nullptr || communicator_->rank() == kind.holder;
  slot.answered = false;
  slot.arrived_at.reset();
  slot.ready_at.reset();
  if (slot.layout.in_room > slot.in.bytes() || slot.layout.out_bytes > slot.out.bytes()) {
    Fail({cudaErrorInvalidValue, "a batch within the limits"});
  }
  return slot;
}

bool CudaPipeline::CopiesItself(const HiddenRows& rows, int64_t bytes) { return IsDirect(rows.place, bytes); }

Result CudaPipeline::CopyChunks(const CudaSlot& slot) {
  // Other ranks have no hidden states: what lies before the arrays comes from the holder.
  int64_t copied = slot.is_held ? 0 : slot.layout.batch_rows;
  const auto copy_before = [&](int64_t end) {
    return CopyAsync(At(slot.in.data(), copied), At(slot.pinned_in.data(), copied), end - copied, copying_);
  };
  const auto copy_rows = [&](const HiddenRows& rows, int64_t bytes, int64_t offset) -> Result {
    if (!CopiesItself(rows, bytes)) return {};
    LOSSD_CUDA_PASS_ON(copy_before(offset));
    copied = offset + bytes;
    return CopyAsync(At(slot.in.data(), offset), rows.data, bytes, copying_);
  };
  if (!slot.is_held) return copy_before(slot.layout.in_bytes);
  int64_t offset = slot.layout.hidden_states;
  for (const ChunkRows& chunk : slot.chunks) {
    const int64_t bytes = chunk.tokens * slot.hidden_row_bytes;
    LOSSD_CUDA_PASS_ON(copy_rows(chunk.hidden_states, bytes, offset));
    offset += bytes;
  }
  offset = slot.layout.teacher_hidden;
  for (const ChunkRows& chunk : slot.chunks) {
    const int64_t bytes = chunk.tokens * slot.teacher_row_bytes;
    if (bytes > 0) LOSSD_CUDA_PASS_ON(copy_rows(chunk.teacher_hidden, bytes, offset));
    offset += bytes;
  }
  return copy_before(slot.layout.in_bytes);
}

Result CudaPipeline::CopyIn(const CudaSlot& slot, int64_t zeros) {
  LOSSD_CUDA_PASS_ON(CopyChunks(slot));
  if (shared_rows_.has_value()) {
    // Those of a teacher end where the arrays begin.
    LOSSD_CUDA_PASS_ON(
        shared_rows_->Share(slot.holder, slot.in.data(), slot.layout.batch_rows, copying_.get()));
  }
  LOSSD_CUDA_TRY(cudaMemsetAsync(slot.out.data(), 0, static_cast<size_t>(zeros), copying_.get()));
  const int64_t tokens_end = slot.layout.dx;
  if (const int64_t tokens = slot.layout.prediction; tokens < tokens_end) {
    constexpr int kMinusOne = 0xFF;  // in every byte
    LOSSD_CUDA_TRY(cudaMemsetAsync(At(slot.out.data(), tokens), kMinusOne,
                                   static_cast<size_t>(tokens_end - tokens), copying_.get()));
  }
  LOSSD_CUDA_TRY(cudaEventRecord(slot.arrived.get(), copying_.get()));
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(computing_.get(), slot.arrived.get()));
  return {};
}

Result CudaPipeline::CopyOut(const CudaSlot& slot) {
  LOSSD_CUDA_TRY(cudaEventRecord(slot.computed.get(), computing_.get()));
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(returning_.get(), slot.ready.get()));
  if (slot.is_held) {
    LOSSD_CUDA_PASS_ON(CopyResults(slot));
  } else {
    const int64_t redone = slot.layout.rows_redone;
    LOSSD_CUDA_PASS_ON(CopyAsync(At(slot.pinned_out.data(), redone), At(slot.out.data(), redone),
                                 sizeof(int32_t), returning_));
  }
  LOSSD_CUDA_TRY(cudaEventRecord(slot.left.get(), returning_.get()));
  return {};
}

Result CudaPipeline::CopyResults(const CudaSlot& slot) {
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
  return copy_before(slot.layout.out_bytes);
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
    if (slot.is_held) HandOut(slot);
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
    BatchReport report = slot.report;
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
      callbacks.on_done(DeviceFailed(failure_, communicator_));
    }
  }
}

}  // namespace lossd::engine
