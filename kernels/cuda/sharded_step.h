// The step of linear_cross_entropy.h for one rank of a vocabulary that lies over GPUs, or for one GPU that
// has all of it and computes it in fixed segments. What travels between ranks does so in a stream of its own,
// beside the products:
//
//   products   E of tile t ─┐ rows of t + 1 ┌▸ part of dX ─┐ dW += ─────┌▸ sum of parts ─ E of t + 1 ...
//   beside                  └▸ statistics ──┘              └▸ parts go ─┘
//
// Each segment of the vocabulary is as a head of its own: E has exponents of its own, and the products see
// nothing else. Its sums and the label's logit, where it has the label, go to all ranks (ShardStatistics);
// each then knows losses, and v and c of its segments. The parts of dX are scaled already: the label's term
// c W_y takes the statistics, and only the segment that has W_y adds it. So they are waited for before dX,
// and what is done meanwhile is the work on the next tile's rows that needs nobody.
//
// Sums over segments are made in the tree of segment_tree.h, and nothing that a segment computes depends on
// which others its rank has: so fixed segments have the same bits on any number of ranks. A rank adds the
// parts of dX as far as the tree lets it by itself, and sends what it then has.
//
// With soft targets (soft_losses.h) or returns of whole rows (shard_returns.h) segments tell each other more,
// and the products wait for it.
#ifndef LOSSD_KERNELS_CUDA_SHARDED_STEP_H_
#define LOSSD_KERNELS_CUDA_SHARDED_STEP_H_

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cuda/exchange_waits.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/peer_memory.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/rows/shard_rows.h"
#include "kernels/cuda/rows/tile_buffers.h"
#include "kernels/cuda/segment_part.h"
#include "kernels/cuda/soft_losses.h"
#include "kernels/cuda/step_observer.h"
#include "kernels/segment_tree.h"
#include "kernels/shard.h"

namespace lossd::kernels::cuda {

// The stream beside the products, and the events between the two. Of one device, for one step at a time. When
// a step's stream has come to its end, nothing of the step is left here but how long it waited for other
// ranks, which the shard's observer is told when the next one begins.
class ShardStreams {
 public:
  // `spared_multiprocessors`: what the product for dW leaves to the communicator's kernels where parts of dX
  // travel by these. They wait for free ones otherwise, until the product ends, and then hold up the next.
  static constexpr int32_t kSparedMultiprocessors = 4;
  static Result Create(ShardStreams* streams, int32_t spared_multiprocessors = kSparedMultiprocessors);

  // Has parts of dX travel by copy engines, where ranks reach each other's memory: `memory` is the step's
  // workspace, equally large on all ranks, and outlives this.
  // Without it they travel by the communicator, whose kernels are slow where they get few multiprocessors.
  // All ranks call it at the same time, when nothing of a step is under way; it waits for them.
  Result Share(collectives::Communicator* communicator, void* memory, int64_t bytes);
  // Whether what lies in the same place as `memory` is within reach at all ranks, so that copy engines move
  // it.
  bool Shares(const void* memory) const { return At(rank_, memory) != nullptr; }

 private:
  friend class ShardedStep;
  friend Result GatherSegments(const Shard& shard, ShardStreams* streams, void* all, int64_t bytes,
                               cudaStream_t stream);

  // The same place in a rank's memory; null where it is not shared.
  void* At(int rank, const void* place) const;
  Result CreateFlags(collectives::Communicator* communicator);
  // In the stream beside: goes on when all ranks have come as far, and what they copied before is there. It
  // takes no multiprocessor while it waits.
  Result Meet();

  DeviceBuffer flags_;  // one a rank: how often it has come here
  uint32_t meetings_ = 0;
  int32_t rank_ = 0;
  int32_t ranks_ = 1;
  int32_t spared_multiprocessors_ = 0;
  std::vector<PeerMemory> peers_;
  Stream beside_;
  Event summed_;    // in the products' stream: what goes to all ranks is made
  Event merged_;    // beside: it has come, or v, c and losses
  Event parted_;    // in the products' stream: the part of dX is made
  Event gathered_;  // beside: parts have come, or the part has left
  ExchangeWaits waits_;
};

// Brings together what each segment has of some rows: `all` is [segments, bytes], this rank's segments are
// there, and the others' are for what follows in `stream`. Where there is one rank it does nothing, and
// `streams` may be null.
Result GatherSegments(const Shard& shard, ShardStreams* streams, void* all, int64_t bytes,
                      cudaStream_t stream);

// What Batch::classes has of label smoothing, one of each of this rank's segments: SumVocabulary's into
// vocabulary_sums [segments, PaddedHidden(hidden)], and with a bias SumBias's into bias_sums [segments].
// Weight and bias are of this rank's entries, class_weights of the whole vocabulary or null.
Result SumSegments(const HeadShape& shape, const Shard& shard, const void* weight, const float* bias,
                   const float* class_weights, float* vocabulary_sums, double* bias_sums,
                   cudaStream_t stream);

class ShardedStep {
 public:
  using Batch = LinearCrossEntropy::Batch;
  using Observer = StepObserver;

  // `teacher`: of the batch's soft targets, or null.
  static int64_t RowsWithin(const HeadShape& shape, const Shard& shard, const TeacherShape* teacher,
                            int64_t workspace_bytes);
  static int64_t WorkspaceBytes(const HeadShape& shape, const Shard& shard, const TeacherShape* teacher,
                                int64_t tile_rows);

  // Whether there is such a step.
  static Result Check(const Batch& batch, const HeadShape& shape, Path path);

  // `batch` has passed Check and outlives the step; `workspace` is WorkspaceBytes of most_rows.
  ShardedStep(const HeadShape& shape, const Batch& batch, int64_t most_rows, void* workspace,
              const Observer& observer);

  // As LinearCrossEntropy::Run, in tiles of `tile_rows` rows, at most `most_rows`, the same on all ranks.
  Result Run(int64_t tile_rows, cudaStream_t stream, cudaEvent_t input_gradients);

 private:
  // One of this rank's segments. Those without entries are left out.
  struct Segment {
    int32_t number = 0;   // among all ranks' segments
    int64_t first = 0;    // from this rank's first entry
    int64_t entries = 0;  // at least 1
    int64_t stride = 0;   // of rows of E
    char* exponentials = nullptr;
  };
  struct SegmentRows {
    RowArrays arrays;
    PlacedLabels labels;
  };
  struct Buffers {                 // the workspace, divided; what there are two of is used by tiles in turn
    char* exponentials = nullptr;  // of one segment behind the other
    std::array<char*, 2> x{};
    char* scaled_x = nullptr;
    float* partials = nullptr;  // sums of E, or maxima, of columns of the vocabulary
    float* parts = nullptr;     // of dX: one of each of this rank's segments, behind them the other ranks'
    std::array<PerSegment<SegmentRows>, 2> rows;
    int32_t segment_stride = 0;  // from the rows' arrays of one segment to those of the next, in floats
    std::array<ShardStatistics*, 2> statistics{};
    SoftLosses::Buffers soft;  // with soft targets only
  };

  static int64_t Divide(const HeadShape& shape, const Shard& shard, const TeacherShape* teacher,
                        int64_t tile_rows, void* base, Buffers* buffers);
  void ListSegments();
  OwnSegments Own() const;
  bool is_alone() const { return shard_.ranks() == 1; }
  int32_t own_segments() const { return SegmentsOf(shard_.rank); }  // with those without entries
  int32_t SegmentsOf(int32_t rank) const {
    return shard_.first_segment(rank + 1) - shard_.first_segment(rank);
  }
  size_t SetOf(int64_t first) const { return static_cast<size_t>(first / tile_rows_ % 2); }
  // The tile of the batch that begins with this row: with all of this rank's entries, and the arrays of its
  // first segment. And what one of its segments, the i-th, has of it.
  TileRows Describe(int64_t first) const;
  TileRows Describe(int64_t first, size_t i) const;
  // Everything that is done before E.
  Result Begin(int64_t first);
  // With soft targets everything before dX: entries of the logits' gradient lie where E does without.
  Result MakeSoftEntries(int64_t first);
  // Returns that need whole rows, from logits that lie where E will.
  Result TellWholeRows(int64_t first);
  // What all of this rank's segments have of the tile.
  std::vector<SegmentPart> PartsOf(int64_t first) const;
  // E of the tile, what is made of its sums, and what can be done meanwhile of the next tile.
  Result MakeEntries(int64_t first);
  Result MakeExponentials(int64_t first);
  Result MakeExponentials(const Segment& segment, const TileRows& tile);
  Result MultiplyLogits(const Segment& segment, const TileRows& tile, Which which);
  // Brings together what all segments know of rows.
  Result ShareStatistics(int64_t first);
  Result MergeStatistics(int64_t first, cudaStream_t stream);
  Result AwaitStatistics();
  Result InputGradient(int64_t first);
  Result InputGradient(int64_t first, size_t i);
  // What travels beside this tile's dW.
  bool SendsParts() const { return !is_alone() && batch_.dx != nullptr && batch_.rows > 0; }
  // The same on all ranks.
  bool PartsAreCopied() const { return streams_->At(shard_.rank, buffers_.parts) != nullptr; }
  Result Send(int64_t first);
  Result SendParts(const TileRows& tile);
  // The segments whose parts of dX a rank has left when it has made the sums that it can make by itself, and
  // where those of another rank come to lie, in parts.
  SegmentBits UnsummedOf(int32_t rank) const;
  int64_t PlaceOf(int32_t rank) const;
  InputGradientParts OwnParts(const TileRows& tile) const;
  Result AddOwnParts(const TileRows& tile);
  Result AddAllParts(int64_t first);
  Result AddWeightGradient(int64_t first);
  Result AddWeightGradient(int64_t first, size_t i);
  Result Record(cudaEvent_t event) const;
  Result Wait(cudaStream_t stream, const Event& event) const;

  const HeadShape shape_;
  const Batch& batch_;
  const Shard& shard_;
  ShardStreams* const streams_;  // null where there is one rank
  const int64_t most_rows_;
  const Maximum maximum_;
  const Observer observer_;
  Buffers buffers_;
  std::vector<Segment> segments_;
  int64_t tile_rows_ = 1;
  cudaStream_t stream_ = nullptr;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_SHARDED_STEP_H_
