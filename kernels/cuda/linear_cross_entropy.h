// The fused step of kernels/linear_cross_entropy.h on a CUDA device: losses, dX and dW of a batch of rows
// whose logits are never held.
//
// Two paths compute the same formulas. kHopper (compute capability 9.0) holds E of a tile of rows in 16 bits
// and makes it in the logits product's own epilogue. kPortable (from 8.0, and fp32 heads everywhere) holds a
// smaller tile of logits in fp32 and uses cuBLAS.
#ifndef LOSSD_KERNELS_CUDA_LINEAR_CROSS_ENTROPY_H_
#define LOSSD_KERNELS_CUDA_LINEAR_CROSS_ENTROPY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/losses/target_lists.h"
#include "kernels/cuda/memory/heads.h"
#include "kernels/cuda/memory/owners.h"
#include "kernels/cuda/memory/result.h"
#include "kernels/cuda/portable/cublas_lt.h"
#include "kernels/cuda/rows/batch_rows.h"
#include "kernels/cuda/rows/held_rows.h"
#include "kernels/cuda/rows/kept_rows.h"
#include "kernels/cuda/rows/row_kernels.h"
#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/shard.h"

namespace lossd::kernels::cuda {

class ShardStreams;  // sharded_step.h

// What the current device takes for heads of this type. Fails if it is older than 8.0.
Result BestPath(DataType weight_type, Path* path);

// Loads all code of our own that heads of this type may run on the current device. The driver's own way is to
// load a kernel when it is first launched, and so to want memory in the middle of a batch.
// CUDA_MODULE_LOADING=EAGER would do the same for all of cuBLAS too, which is hundreds of MiB.
Result LoadKernels(DataType weight_type);

class LinearCrossEntropy {
 public:
  using Shape = HeadShape;

  // Rows of a tile that `workspace_bytes` lets the step work on at once, at most kMostTileRows; 0 if not one
  // fits. And the bytes that so many rows need.
  static constexpr int64_t kMostTileRows = 16384;
  static constexpr int64_t kMostPortableRows = 1024;  // on Path::kPortable
  static int64_t RowsWithin(const Shape& shape, Path path, int64_t workspace_bytes);
  static int64_t WorkspaceBytes(const Shape& shape, Path path, int64_t tile_rows);
  // The same for batches with soft targets of such a teacher, which hold other things in the workspace.
  static int64_t RowsWithin(const Shape& shape, Path path, const TeacherShape& teacher,
                            int64_t workspace_bytes);
  static int64_t WorkspaceBytes(const Shape& shape, Path path, const TeacherShape& teacher,
                                int64_t tile_rows);
  // The same for batches of a vocabulary in segments, on Path::kHopper: enough for the rank that has the most
  // entries, so that ranks whose workspaces are equally large cut a batch into the same tiles; with
  // Segments::kFixed enough for one rank that has all of them. `teacher`: of the batch's soft targets, or
  // null.
  static int64_t RowsWithin(const Shape& shape, const Shard& shard, int64_t workspace_bytes,
                            const TeacherShape* teacher = nullptr);
  static int64_t WorkspaceBytes(const Shape& shape, const Shard& shard, int64_t tile_rows,
                                const TeacherShape* teacher = nullptr);

  // `workspace` is device memory of WorkspaceBytes, 256-byte aligned, that outlives the step; steps that are
  // never under way at once may share it. `library` is needed for kPortable only. `workspace_bytes`, if there
  // are more than WorkspaceBytes, are for batches with soft targets and for those in segments; ranks must
  // agree in it.
  LinearCrossEntropy(const Shape& shape, Path path, int64_t tile_rows, void* workspace, CublasLt* library,
                     int64_t workspace_bytes = 0);

  // Has the library load what its products of these sizes take, by running each of them once over whatever
  // the workspace holds; does nothing on Hopper's own path. dw [vocab, PaddedHidden(hidden)] is overwritten,
  // or null if there will never be one.
  Result LoadLibraryProducts(const void* weight, float* dw, cudaStream_t stream);
  // The same of what batches with soft targets of such a teacher take; to be called before the first of them,
  // in a stream where no batch that shares the workspace is under way beside it. Does nothing where both
  // paths are Hopper's. dw keeps its values, and is null if there will never be one.
  Result LoadTeacherProducts(const void* weight, float* dw, const TeacherHead& teacher, cudaStream_t stream);

  enum class HoldUse {
    kNone,
    kKeep,  // rows without gradients are left in the hold
    kTake,  // rows with gradients were left there
  };

  struct Batch {
    // Null, or of one segment: this is the whole head. Otherwise the step is one of as many as there are
    // ranks, each run with the same rows and options. The step's shape, `weight`, `bias`, `dw`, `db`,
    // weight_largest and bias_largest, and the teacher's weight, bias and largest magnitudes, are then of
    // this rank's entries, classes.vocabulary_sum and classes.bias_sum of each of its segments (SumSegments);
    // labels, class weights and classes.sum are of the whole vocabulary, which labels and class weights are
    // numbered by. Losses, returns and dX are written by the rank that answers; elsewhere their pointers only
    // say what is wanted. dW, db and smoothing_gradient are each rank's own; rows_redone counts what this
    // rank did again, a row once for each segment. Everything that is read must be there before Run
    // (SharedRows).
    //
    // With Segments::kFixed results have the same bits for any number of ranks, one included, that work with
    // tiles of the same rows: where all have the same workspace_bytes, more than any of them needs for less.
    //
    // cudaErrorNotSupported, with nothing enqueued: Path::kPortable.
    // cudaErrorExternalDevice: the communicator has failed, and its next call says why. When a rank is lost,
    // the streams of the others may wait for ever: Communicator::Wait does not.
    const Shard* shard = nullptr;
    ShardStreams* shard_streams = nullptr;  // with ranks: of this step's device

    // Device memory. Arrays of BatchRows, copied.
    int64_t rows = 0;
    const int32_t* batch_rows = nullptr;
    const int32_t* labels = nullptr;
    const float* gradient_scales = nullptr;
    const float* z_gradient_scales = nullptr;  // null: gradient_scales
    const float* token_weights = nullptr;      // null: 1
    const float* lse_gradients = nullptr;      // null: 0
    const float* entropy_gradients = nullptr;  // null: 0; other bits of gradients than zeros have
    const float* shares = nullptr;             // null: all count in dW
    const int32_t* by_label = nullptr;
    // Lists of kept tokens (KeptRows). Such a batch has no label smoothing, no soft targets and no top_k, and
    // its vocabulary is whole: `shard` means nothing. Bits of rows with short lists are the same on every
    // path; those with long ones go through the path's own products. Which a row is depends on its list
    // alone.
    struct Kept {
      const int32_t* offsets = nullptr;  // null: no lists
      const int32_t* tokens = nullptr;
      const int32_t* by_token = nullptr;
      const int32_t* token_starts = nullptr;
      std::span<const KeptTile> tiles = {};  // in memory of the host, until Run has returned
    };
    Kept kept;
    // Soft targets on lists (TargetRows), whose weights `distillation` has. Such a batch has no label
    // smoothing, no teacher and no kept tokens, and its vocabulary is in one piece: cudaErrorInvalidValue
    // otherwise.
    struct Targets {
      const int32_t* offsets = nullptr;  // null: none
      const int32_t* tokens = nullptr;
      const float* probabilities = nullptr;
      float* logits = nullptr;  // [tokens], to be overwritten
    };
    Targets targets;

    // Phase one of rows of which there will be a phase two, and that; only of batches that Holds says so of.
    // kKeep: the batch's first row is left at `first_held`, the others behind it. kTake: they were left there
    // by rows with the same labels, options that Holds names and weights, and with their moments
    // (KeepsMoments) if this batch has entropy_gradients; `held_rows` says where each is, or where that is
    // null they are one after the other from `first_held` on. Results have the same bits as without a hold.
    // cudaErrorInvalidValue for what cannot be.
    HoldUse hold_use = HoldUse::kNone;
    const HoldSpace* hold = nullptr;
    int64_t first_held = 0;
    const int32_t* held_rows = nullptr;

    LossOptions options;
    // Soft targets. Such a batch keeps nothing of label smoothing beside dW: smoothing_gradient and
    // classes.vocabulary_sum are not used. A workspace that RowsWithin says has no room for such a teacher is
    // cudaErrorInvalidValue.
    const TeacherHead* teacher = nullptr;  // null: none, and `distillation` means nothing but for `targets`
    Distillation distillation;
    // Without class weights: as it is made, but for the sum, which is then the vocabulary's size whatever it
    // says. vocabulary_sum is SumVocabulary's and
    // bias_sum SumBias's, of these weights.
    ClassWeightTerms classes;

    const void* weight = nullptr;           // W [vocab, PaddedHidden(hidden)], padding zero, 16-byte aligned
    const float* weight_largest = nullptr;  // one value, of LargestMagnitude(W)
    const float* bias = nullptr;            // b [vocab], 16-byte aligned; null: none
    const float* bias_largest = nullptr;    // one value, of LargestShift(b)
    DataType hidden_type = DataType::kBFloat16;
    const void* hidden_states = nullptr;  // [*, hidden], not padded
    float* losses = nullptr;              // [*]; rows that are not valid are left alone, here and below
    RowReturns returns;                   // [*] each
    DataType dx_type = DataType::kBFloat16;
    void* dx = nullptr;  // [*, hidden] or null
    WeightGradient weight_gradient = WeightGradient::kNone;
    float* dw = nullptr;  // [vocab, PaddedHidden(hidden)]
    // db [vocab], overwritten or added to as dw is. Required with a bias; without one it may be given, and
    // what is added is nothing.
    float* db = nullptr;
    // With label smoothing, without softcap and without gradients of the entropy dW lacks -C_v t_h, which the
    // caller keeps: t [PaddedHidden(hidden)]. Used where weight_gradient is not kNone.
    float* smoothing_gradient = nullptr;
    WeightGradient smoothing_store = WeightGradient::kNone;

    int32_t* rows_redone = nullptr;  // one value, added to; may be null
    int32_t exponent_bias = 0;       // even; for tests: results must not depend on it
  };

  // Enqueues everything on `stream`. `input_gradients`, if not null, is recorded once losses and dX of the
  // whole batch are final, before the last tile's dW (over several ranks: behind it). `between`, for
  // measurements, is called after each stage.
  using Stage = void (*)(void* context, const char* name);
  Result Run(const Batch& batch, cudaStream_t stream, cudaEvent_t input_gradients, Stage between = nullptr,
             void* context = nullptr);

  // Logits alone, for so many rows at once as there are places for. To be filled in before MultiplyLogits, on
  // the same stream: hidden states x [most_rows, PaddedHidden(hidden)] of the head's type, padding zero. What
  // follows on the stream finds the sums of the product [most_rows, stride], before bias, scale and softcap,
  // and has places for the `top_k` largest logits of each row; where those are is x no longer needed.
  struct LogitPlaces {
    int64_t most_rows = 0;  // at least 1
    void* x = nullptr;
    float* sums = nullptr;
    int64_t stride = 0;
    int32_t* top_tokens = nullptr;  // [most_rows, top_k]
    float* top_logits = nullptr;    // [most_rows, top_k]
    float* log_sum_exp = nullptr;   // [most_rows]
  };
  LogitPlaces PlacesOfLogits(int32_t top_k) const;
  Result MultiplyLogits(int64_t rows, const void* weight, cudaStream_t stream) const;

  // Whether a batch's rows can be left in a hold, and taken from it. They are good for another batch of this
  // head, its weights and labels, with the same logit_scale, softcap and bias.
  bool Holds(const Batch& batch) const;
  // Whether what a batch without gradients leaves in a hold has moments.
  static bool KeepsMoments(const Batch& batch);

  // The rows of these parts whose labels are not ignore_index, as Run wants them. `teacher` here and below:
  // of the batch's soft targets, or null.
  BatchRows Arrange(std::span<const LabelledRows> parts, const TeacherShape* teacher = nullptr) const;
  // The same for a batch in segments, as all ranks want them: labels are those of the whole vocabulary.
  BatchRows Arrange(std::span<const LabelledRows> parts, const Shard& shard,
                    const TeacherShape* teacher = nullptr) const;

  // Rows of the tiles that a batch of `rows` is cut into: as many as the workspace has room for, or fewer if
  // that keeps the device busier.
  int64_t RowsPerTile(int64_t rows, const TeacherShape* teacher = nullptr) const;
  int64_t RowsPerTile(int64_t rows, const Shard& shard, const TeacherShape* teacher = nullptr) const;
  // The size of batches that lose least.
  int64_t BestBatchRows(const TeacherShape* teacher = nullptr) const;
  int64_t BestBatchRows(const Shard& shard, const TeacherShape* teacher = nullptr) const;

  // A list with so many kept tokens is long: products with the whole of the weights take its row less time
  // than those with the rows of the weights that it names. Measured in docs/performance.md; on
  // Path::kPortable the library's products have all rows of a tile, however few there are.
  static constexpr int64_t kLongList = 1024;
  static constexpr int64_t kPortableLongList = 16384;
  // Whether the workspace has room for a row with so many kept tokens.
  bool HasRoomForList(int64_t tokens) const;

  // The part of TileRows that a batch gives: everything except what the step computes.
  static TileRows DescribeRows(const Shape& shape, Path path, const Batch& batch, int64_t first,
                               int64_t rows);

 private:
  struct Buffers;  // the workspace, divided

  // Rows of a tile that the workspace has room for.
  int64_t MostRows(const TeacherShape* teacher) const;
  // The time that a tile of so many rows takes, in rows of a step that keeps all of the device busy.
  double TileCost(int64_t rows, int64_t vocab) const;
  // The best tile of at most `most` rows; a multiple of `step` unless there are fewer.
  int64_t BestTile(int64_t rows, int64_t most, int64_t step, int64_t vocab) const;
  static int64_t Divide(const Shape& shape, Path path, int64_t tile_rows, void* base, Buffers* buffers);
  TileRows DescribeTile(const Batch& batch, int64_t first, int64_t rows, const Buffers& buffers) const;
  static Result TellHopperRows(const TileRows& tile, int64_t tile_rows, const Buffers& buffers,
                               cudaStream_t stream);
  Result CheckHold(const Batch& batch) const;
  static Result CheckTargets(const Batch& batch);
  // The workspace for rows `first` on of a batch, or memory of its hold in place of some of it; and the tile
  // that goes with it.
  TileRows PlaceTile(const Batch& batch, int64_t first, int64_t rows, Buffers* buffers) const;
  Result MultiplyHopperLogits(const TileRows& tile, Which which, const Buffers& buffers, cudaStream_t stream);
  Result FindHopperSums(const TileRows& tile, const Buffers& buffers, cudaStream_t stream);
  Result TakeHeldSums(const Batch& batch, const TileRows& tile, const Buffers& buffers, cudaStream_t stream);
  Result HopperLosses(const Batch& batch, const TileRows& tile, const Buffers& buffers, cudaStream_t stream);
  Result HopperInputGradient(const Batch& batch, const TileRows& tile, const Buffers& buffers,
                             cudaStream_t stream);
  Result PortableLosses(const Batch& batch, const TileRows& tile, const Buffers& buffers,
                        cudaStream_t stream);
  Result PortableInputGradient(const Batch& batch, const TileRows& tile, const Buffers& buffers,
                               cudaStream_t stream);
  Result ClearRowsBehind(int64_t rows, const Buffers& buffers, cudaStream_t stream) const;
  Result MultiplyPortableLogits(const void* weight, const Buffers& buffers, cudaStream_t stream) const;
  Result MultiplyPortableInputGradient(const void* weight, const Buffers& buffers, cudaStream_t stream) const;
  Result MultiplyPortableWeightGradient(int64_t rows, const Buffers& buffers, WeightGradient gradient,
                                        float* dw, cudaStream_t stream) const;
  // Where logits and what is made of them are while rows have long lists, beside their entries.
  struct LongListPlaces {
    int64_t rows = 0;        // of a tile; 0: there is no room, and all lists count as short
    int64_t logit_rows = 0;  // at once
    float* logits = nullptr;
    int64_t entries = 0;  // of a tile's lists
    float* values = nullptr;
  };
  LongListPlaces PlacesOfLongLists(const Buffers& buffers) const;
  LongListPlaces PlacesOfLongLists() const;
  void CutLists(BatchRows* batch) const;
  int64_t LongList() const { return path_ == Path::kHopper ? kLongList : kPortableLongList; }
  // Tiles of the rows behind those with short lists.
  void CutLongLists(BatchRows* batch, std::vector<KeptTile>* tiles) const;
  Result RunKept(const Batch& batch, cudaStream_t stream, cudaEvent_t input_gradients);
  Result ClearGradients(const Batch& batch, cudaStream_t stream) const;
  Result RunLongLists(const Batch& batch, const KeptTile& of, cudaStream_t stream,
                      cudaEvent_t input_gradients);
  Result PickLongLists(const Batch& batch, const TileRows& tile, const KeptLists& lists,
                       const Buffers& buffers, cudaStream_t stream) const;
  Result RunSegments(const Batch& batch, cudaStream_t stream, cudaEvent_t input_gradients) const;
  Result RunDistillation(const Batch& batch, cudaStream_t stream, cudaEvent_t input_gradients) const;
  static ListedTargets TargetsOf(const Batch& batch, int64_t first) {
    return {batch.targets.offsets + first, batch.targets.tokens, batch.targets.probabilities,
            batch.targets.logits};
  }
  Result PutTargetEntries(const Batch& batch, int64_t first, const TileRows& tile, const Buffers& buffers,
                          cudaStream_t stream) const;
  Result AddBiasGradients(const Batch& batch, const TileRows& tile, const Buffers& buffers, bool overwrite,
                          cudaStream_t stream);
  Result AddWeightGradient(const Batch& batch, const TileRows& tile, const Buffers& buffers, bool overwrite,
                           cudaStream_t stream);
  void Report(const char* stage) const {
    if (between_ != nullptr) between_(context_, stage);
  }

  const Shape shape_;
  const Path path_;
  const int64_t tile_rows_;
  int32_t multiprocessors_ = 0;  // 0: not known
  CublasLt* const library_;
  void* const workspace_;
  const int64_t workspace_bytes_;
  Stage between_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LINEAR_CROSS_ENTROPY_H_
