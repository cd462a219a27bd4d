// The way of batches through a CUDA device: while one is computed, the next is copied in and the one before
// is copied out. Three streams, ordered by events; a ring of slots, each with the pinned and device memory of
// one batch; and polling, since a host function in a stream is not called once the device has failed.
//
//   copying    pinned_in -> in ─┐ arrived
//   computing                   └▸ losses, dX ─┐ ready ─ dW ─ computed
//   returning                                  └▸ out -> pinned_out ─ left
//
// Chunks whose memory the device knows (MemoryPlace) are copied from there and to there; pinned memory is for
// all others, and for what is small.
//
// Belongs to the device's owner thread; nothing here blocks.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_PIPELINE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_PIPELINE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/memory/shared_rows.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// What a batch has beyond what all have.
struct SlotExtras {
  bool z_gradient_scales = false;
  bool token_weights = false;
  bool lse_gradients = false;
  bool entropy_gradients = false;
  bool held_rows = false;
  ChunkLists::Use lists = ChunkLists::Use::kNone;
  int64_t list_entries = 0;
  WantedReturns returns;

  static SlotExtras Of(const BatchKey& kind, std::span<const ChunkRows> chunks);
  static SlotExtras Most();
};

// Where the parts of a batch lie in its slot, in bytes. Everything is aligned to kAlignment; what a batch has
// not takes nothing.
struct SlotLayout {
  static constexpr int64_t kAlignment = 256;

  // In, on the way to the device. Behind the hidden states, arrays of four-byte elements.
  int64_t hidden_states = 0;
  int64_t teacher_hidden = 0;
  int64_t batch_rows = 0;
  int64_t labels = 0;
  int64_t gradient_scales = 0;
  int64_t shares = 0;
  int64_t by_label = 0;
  int64_t z_gradient_scales = 0;
  int64_t token_weights = 0;
  int64_t lse_gradients = 0;
  int64_t entropy_gradients = 0;
  int64_t held_rows = 0;
  int64_t list_offsets = 0;
  int64_t list_tokens = 0;
  int64_t kept_by_token = 0;
  int64_t kept_token_starts = 0;
  int64_t target_probabilities = 0;
  int64_t in_bytes = 0;
  // Behind all that, on the device alone.
  int64_t target_logits = 0;
  int64_t in_room = 0;
  // Out, on the way back.
  int64_t losses = 0;
  int64_t rows_redone = 0;
  int64_t log_sum_exp = 0;
  int64_t z_loss = 0;
  int64_t log_probability = 0;
  int64_t entropy = 0;
  int64_t divergence = 0;
  int64_t top_log_probabilities = 0;
  int64_t prediction = 0;  // from here to dx: tokens and ranks, which are -1 where a row is ignored
  int64_t target_rank = 0;
  int64_t top_tokens = 0;
  int64_t dx = 0;
  int64_t out_bytes = 0;

  static SlotLayout Of(int64_t tokens, int64_t hidden_bytes, int64_t teacher_bytes, int64_t dx_bytes,
                       const SlotExtras& extras);
};

// The arrays of `returns` that are wanted, in memory that begins with `out`; the others are null.
kernels::RowReturns ReturnsIn(void* out, const SlotLayout& layout, const WantedReturns& returns);

// A batch under way and the memory it has. All memory is the batch's until it is done.
struct CudaSlot {
  kernels::cuda::PinnedBuffer pinned_in;
  kernels::cuda::PinnedBuffer pinned_out;
  kernels::cuda::DeviceBuffer in;
  kernels::cuda::DeviceBuffer out;
  kernels::cuda::Event arrived;   // on the copying stream: `in` is there
  kernels::cuda::Event ready;     // on the computing stream: `out` is final
  kernels::cuda::Event computed;  // on the computing stream: so is dW
  kernels::cuda::Event left;      // on the returning stream: `pinned_out` is there

  SlotExtras extras;
  SlotLayout layout;
  int64_t hidden_row_bytes = 0;
  int64_t teacher_row_bytes = 0;  // 0: no teacher
  int64_t dx_row_bytes = 0;       // 0: loss or dW only
  std::vector<ChunkRows> chunks;
  BatchCallbacks callbacks;
  bool adds = false;  // to dW
  BatchReport report;
  // Over ranks: hidden states come from this one, and results leave from there.
  int32_t holder = 0;
  bool is_held = true;  // here
  bool answered = false;
  // When Poll found it so, of batches whose callbacks want to know.
  std::optional<absl::Time> arrived_at;
  std::optional<absl::Time> ready_at;
};

class CudaPipeline {
 public:
  // One batch on its way in, one on the computing stream, one on its way out.
  static constexpr size_t kSlots = 3;

  // What the largest batch has.
  struct Capacity {
    int64_t tokens = 0;
    int64_t hidden_bytes = 0;  // with those of a teacher
    int64_t dx_bytes = 0;
  };

  // Takes all memory that will ever be taken.
  kernels::cuda::Result Create(const Capacity& capacity);
  // From now on hidden states come to a batch's holder, which gives them to the pipelines of the other ranks
  // and alone gives results; batches are begun in one order at all ranks, and no more of them than fit here
  // are under way anywhere. All ranks call it at the same time, before the first batch. `communicator`
  // outlives this.
  kernels::cuda::Result JoinRanks(kernels::collectives::Communicator* communicator);

  const Capacity& capacity() const { return capacity_; }
  int64_t device_bytes() const;
  int64_t under_way() const { return static_cast<int64_t>(under_way_); }
  cudaStream_t computing() const { return computing_.get(); }

  // Takes the next slot: the batch is under way from now on, and its callbacks will be called by Poll
  // whatever happens. To be followed by CopyIn, work on computing() that records `ready`, and CopyOut; or by
  // Fail. Fewer than kSlots batches are under way.
  CudaSlot& Begin(const BatchKey& kind, std::span<const ChunkRows> chunks, int64_t hidden_size,
                  BatchCallbacks callbacks);
  // Whether pinned_in has no part in these hidden states.
  static bool CopiesItself(const HiddenRows& rows, int64_t bytes);
  // What pinned_in and the chunks hold goes to the device, and hidden states to that of every rank; the first
  // `zeros` bytes of `out` are cleared, tokens and ranks among them made -1, and computing() waits for all.
  kernels::cuda::Result CopyIn(const CudaSlot& slot, int64_t zeros);
  kernels::cuda::Result CopyOut(const CudaSlot& slot);
  // Everything under way, and everything that is begun from now on, ends with this.
  void Fail(const kernels::cuda::Result& failure);
  const kernels::cuda::Result& failure() const { return failure_; }

  // Device::Poll.
  void Poll();

 private:
  kernels::cuda::Result CreateSlot(const SlotLayout& most, CudaSlot* slot);
  // What the chunks have of their own, and the rest of `in`.
  kernels::cuda::Result CopyChunks(const CudaSlot& slot);
  kernels::cuda::Result CopyResults(const CudaSlot& slot);
  // Looks whether the batch has come further, if somebody wants to know.
  static void NoteTimes(CudaSlot& slot);
  // Answers the batch if that can be done now; `*done` if nothing of it is under way any more.
  static kernels::cuda::Result Look(CudaSlot& slot, bool* done);

  Capacity capacity_;
  std::array<CudaSlot, kSlots> slots_;
  size_t oldest_ = 0;
  size_t under_way_ = 0;
  kernels::cuda::Stream copying_;
  kernels::cuda::Stream computing_;
  kernels::cuda::Stream returning_;
  std::optional<kernels::cuda::SharedRows> shared_rows_;        // if there are ranks
  kernels::collectives::Communicator* communicator_ = nullptr;  // the same
  kernels::cuda::Result failure_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_CUDA_CUDA_PIPELINE_H_
