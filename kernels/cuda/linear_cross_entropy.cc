#include "kernels/cuda/linear_cross_entropy.h"

#include <algorithm>

#include "kernels/cuda/distillation.h"
#include "kernels/cuda/losses/part_soft_targets.h"
#include "kernels/cuda/losses/smoothing.h"
#include "kernels/cuda/losses/soft_targets.h"
#include "kernels/cuda/losses/target_lists.h"
#include "kernels/cuda/portable/products.h"
#include "kernels/cuda/portable/softmax_rows.h"
#include "kernels/cuda/rows/bias.h"
#include "kernels/cuda/rows/kept_rows.h"
#include "kernels/cuda/rows/logit_outputs.h"
#include "kernels/cuda/rows/long_lists.h"
#include "kernels/cuda/rows/part_returns.h"
#include "kernels/cuda/rows/row_returns.h"
#include "kernels/cuda/rows/shard_rows.h"
#include "kernels/cuda/rows/tile_buffers.h"
#include "kernels/cuda/sharded_step.h"
#include "kernels/cuda/sm90/products.h"
#include "kernels/cuda/soft_losses.h"
#include "kernels/cuda/step_buffers.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kManyTiles = 64;
static_assert(HoldSpace::kPieceColumns == sm90::kLogitColumns);

// With soft targets, logits come so many at a time.
int64_t StepOfTiles(const TeacherShape* teacher) {
  return teacher == nullptr ? kWholeRows : SoftLosses::kLogitRows;
}

bool HasGradients(const LinearCrossEntropy::Batch& batch) {
  return batch.dx != nullptr || batch.weight_gradient != WeightGradient::kNone;
}

// Whether entries are not multiples of E for the sake of the entropy alone.
bool SpreadsAlone(const TileRows& tile) {
  return tile.smoothing == Smoothing::kElementwise && tile.options.label_smoothing == 0 &&
         tile.options.softcap == 0;
}

}  // namespace

Result BestPath(DataType weight_type, Path* path) {
  int device = 0;
  int major = 0;
  int minor = 0;
  LOSSD_CUDA_TRY(cudaGetDevice(&device));
  LOSSD_CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  LOSSD_CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major < 8) return {cudaErrorNotSupported, "a device of compute capability 8.0 or later"};
  const bool hopper = major == 9 && minor == 0;  // code for sm_90a runs nowhere else
  *path = hopper && weight_type != DataType::kFloat32 ? Path::kHopper : Path::kPortable;
  return {};
}

Result LoadKernels(DataType weight_type) {
  Path path = Path::kPortable;
  LOSSD_CUDA_PASS_ON(BestPath(weight_type, &path));
  LOSSD_CUDA_PASS_ON(LoadRowKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadKeptKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadLongListKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadPortableKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadSmoothingKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadReturnKernels());
  LOSSD_CUDA_PASS_ON(LoadLogitOutputKernels());
  LOSSD_CUDA_PASS_ON(LoadSoftTargetKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadTargetListKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadBiasKernels(weight_type));
  if (path == Path::kPortable) return {};
  LOSSD_CUDA_PASS_ON(LoadShardKernels());
  LOSSD_CUDA_PASS_ON(LoadPartReturnKernels());
  LOSSD_CUDA_PASS_ON(LoadPartSoftTargetKernels(weight_type));
  LOSSD_CUDA_PASS_ON(sm90::LoadLogitKernels(weight_type));
  LOSSD_CUDA_PASS_ON(LoadHeldRowKernels(weight_type));
  LOSSD_CUDA_PASS_ON(sm90::LoadTransformedLogitKernels(weight_type));
  LOSSD_CUDA_PASS_ON(sm90::LoadMomentLogitKernels(weight_type));
  LOSSD_CUDA_PASS_ON(sm90::LoadEntryKernels(weight_type));
  LOSSD_CUDA_PASS_ON(sm90::LoadMaximumKernels(weight_type));
  LOSSD_CUDA_PASS_ON(sm90::LoadInputGradientKernels(weight_type));
  LOSSD_CUDA_PASS_ON(sm90::LoadSmoothedInputGradientKernels(weight_type));
  return sm90::LoadWeightGradientKernels(weight_type);
}

int64_t LinearCrossEntropy::Divide(const Shape& shape, Path path, int64_t tile_rows, void* base,
                                   Buffers* buffers) {
  Divider divider(base);
  Buffers& b = *buffers;
  const int64_t padded = PaddedHidden(shape.hidden);
  const int64_t element = SizeOf(shape.weight_type);
  const int64_t arrays = tile_rows * static_cast<int64_t>(sizeof(float));
  b.stride = RoundUp(shape.vocab, 8);
  // Room for one row in fp32 at least.
  divider.Take(&b.exponentials, path == Path::kHopper ? std::max<int64_t>(tile_rows, 2) * b.stride * element
                                                      : tile_rows * b.stride * 4);
  divider.Take(&b.x, tile_rows * padded * element);
  divider.Take(&b.scaled_x, tile_rows * padded * element);
  if (path == Path::kHopper) {
    // Maxima are done with before sums begin.
    const int64_t pieces =
        std::max(sm90::MostMaximumTiles(shape.vocab), CeilDivide(shape.vocab, sm90::kLogitColumns));
    divider.Take(&b.partials, pieces * arrays);
    divider.Take(&b.moments, CeilDivide(shape.vocab, sm90::kLogitColumns) * arrays);
  } else {
    divider.Take(&b.product, tile_rows * padded * static_cast<int64_t>(sizeof(float)));
    divider.Take(&b.library, CublasLt::kWorkspaceBytes);
  }
  b.rows.Take(tile_rows, &divider);
  return divider.used();
}

int64_t LinearCrossEntropy::WorkspaceBytes(const Shape& shape, Path path, int64_t tile_rows) {
  Buffers buffers;
  return Divide(shape, path, tile_rows, nullptr, &buffers);
}

int64_t LinearCrossEntropy::RowsWithin(const Shape& shape, Path path, int64_t workspace_bytes) {
  int64_t fits = 0;
  int64_t too_many = (path == Path::kHopper ? kMostTileRows : kMostPortableRows) + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (WorkspaceBytes(shape, path, middle) <= workspace_bytes ? fits : too_many) = middle;
  }
  return fits > kWholeRows ? fits / kWholeRows * kWholeRows : fits;
}

int64_t LinearCrossEntropy::RowsWithin(const Shape& shape, Path path, const TeacherShape& teacher,
                                       int64_t workspace_bytes) {
  return DistillationStep::RowsWithin(shape, path, teacher, workspace_bytes);
}

int64_t LinearCrossEntropy::WorkspaceBytes(const Shape& shape, Path path, const TeacherShape& teacher,
                                           int64_t tile_rows) {
  return DistillationStep::WorkspaceBytes(shape, path, teacher, tile_rows);
}

int64_t LinearCrossEntropy::RowsWithin(const Shape& shape, const Shard& shard, int64_t workspace_bytes,
                                       const TeacherShape* teacher) {
  return ShardedStep::RowsWithin(shape, shard, teacher, workspace_bytes);
}

int64_t LinearCrossEntropy::WorkspaceBytes(const Shape& shape, const Shard& shard, int64_t tile_rows,
                                           const TeacherShape* teacher) {
  return ShardedStep::WorkspaceBytes(shape, shard, teacher, tile_rows);
}

LinearCrossEntropy::LinearCrossEntropy(const Shape& shape, Path path, int64_t tile_rows, void* workspace,
                                       CublasLt* library, int64_t workspace_bytes)
    : shape_(shape),
      path_(path),
      tile_rows_(tile_rows),
      library_(library),
      workspace_(workspace),
      workspace_bytes_(std::max(workspace_bytes, WorkspaceBytes(shape, path, tile_rows))) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    multiprocessors_ = 0;
  }
}

BatchRows LinearCrossEntropy::Arrange(std::span<const LabelledRows> parts,
                                      const TeacherShape* teacher) const {
  const bool long_lists = PlacesOfLongLists().rows > 0;
  BatchRows valid = long_lists ? SelectValidRows(parts, LongList()) : SelectValidRows(parts);
  if (valid.kept.offsets.empty()) {
    OrderByLabel(RowsPerTile(valid.rows, teacher), &valid);
    return valid;
  }
  CutLists(&valid);
  return valid;
}

BatchRows LinearCrossEntropy::Arrange(std::span<const LabelledRows> parts, const Shard& shard,
                                      const TeacherShape* teacher) const {
  BatchRows valid = SelectValidRows(parts);
  OrderByLabel(RowsPerTile(valid.rows, shard, teacher), &valid);
  return valid;
}

double LinearCrossEntropy::TileCost(int64_t rows, int64_t vocab) const {
  if (rows == 0) return 0;
  // All in rows of the step. Measured (docs/performance.md): adding to dW once more; the kernels that a tile
  // needs whatever its rows, 0.1 ms at 700 TFLOP/s; and below 1500 rows the dW product, a third of the step,
  // takes as long as for 1500.
  constexpr double kPassRows = 50;
  constexpr double kKernelOperations = 7e10;
  constexpr int64_t kLeastRows = 1500;
  const double kernels =
      kKernelOperations / (6.0 * static_cast<double>(vocab) * static_cast<double>(shape_.hidden));
  const auto waiting = static_cast<double>(std::max<int64_t>(0, kLeastRows - rows)) / 3;
  return kPassRows + kernels + waiting + sm90::InputGradientCost(rows, shape_.hidden, multiprocessors_);
}

int64_t LinearCrossEntropy::MostRows(const TeacherShape* teacher) const {
  return teacher == nullptr ? tile_rows_ : RowsWithin(shape_, path_, *teacher, workspace_bytes_);
}

int64_t LinearCrossEntropy::RowsPerTile(int64_t rows, const TeacherShape* teacher) const {
  const int64_t most = MostRows(teacher);
  if (path_ != Path::kHopper || multiprocessors_ == 0) return most;
  return BestTile(rows, most, StepOfTiles(teacher), shape_.vocab);
}

// The same on all ranks.
int64_t LinearCrossEntropy::RowsPerTile(int64_t rows, const Shard& shard, const TeacherShape* teacher) const {
  return BestTile(rows, RowsWithin(shape_, shard, workspace_bytes_, teacher), StepOfTiles(teacher),
                  CeilDivide(shard.vocab, shard.segments()));
}

int64_t LinearCrossEntropy::BestTile(int64_t rows, int64_t most, int64_t step, int64_t vocab) const {
  int64_t best = std::min(rows, most);
  const auto cost = [&](int64_t tile) {
    const int64_t whole = rows / tile;
    return static_cast<double>(whole) * TileCost(tile, vocab) + TileCost(rows % tile, vocab);
  };
  for (int64_t tile = best / step * step; tile > most / 4; tile -= step) {
    if (cost(tile) < cost(best)) best = tile;
  }
  return best;
}

int64_t LinearCrossEntropy::BestBatchRows(const TeacherShape* teacher) const {
  return RowsPerTile(kManyTiles * MostRows(teacher), teacher);
}

int64_t LinearCrossEntropy::BestBatchRows(const Shard& shard, const TeacherShape* teacher) const {
  return RowsPerTile(kManyTiles * RowsWithin(shape_, shard, workspace_bytes_, teacher), shard, teacher);
}

TileRows LinearCrossEntropy::DescribeRows(const Shape& shape, Path path, const Batch& batch, int64_t first,
                                          int64_t rows) {
  TileRows tile;
  tile.rows = static_cast<int32_t>(rows);
  tile.vocab = shape.vocab;
  tile.hidden = shape.hidden;
  tile.padded_hidden = PaddedHidden(shape.hidden);
  tile.type = shape.weight_type;
  tile.weight = batch.weight;
  tile.weight_largest = batch.weight_largest;
  tile.bias = batch.bias;
  tile.bias_largest = batch.bias_largest;
  tile.batch_rows = batch.batch_rows + first;
  tile.labels = batch.labels + first;
  const auto from_first = [first](const float* array) { return array == nullptr ? nullptr : array + first; };
  tile.gradient_scales = batch.gradient_scales + first;
  tile.z_gradient_scales = from_first(batch.z_gradient_scales);
  tile.token_weights = from_first(batch.token_weights);
  tile.lse_gradients = from_first(batch.lse_gradients);
  tile.shares = from_first(batch.shares);
  tile.by_label = batch.by_label + first;
  tile.gradient_wanted = batch.dx != nullptr || batch.weight_gradient != WeightGradient::kNone;
  if (tile.gradient_wanted) tile.entropy_gradients = from_first(batch.entropy_gradients);
  tile.options = batch.options;
  tile.smoothing = SmoothingOf(batch.options);
  if (tile.entropy_gradients != nullptr) tile.smoothing = Smoothing::kElementwise;
  if (batch.targets.offsets != nullptr) {
    tile.smoothing = Smoothing::kElementwise;
    tile.target_weight = batch.distillation.weight;
    tile.label_weight = batch.distillation.label_weight;
  }
  // With soft targets every entry has its own gradient in any case.
  if (batch.teacher != nullptr && tile.smoothing == Smoothing::kRankOne) {
    tile.smoothing = Smoothing::kElementwise;
  }
  tile.classes = batch.classes;
  tile.whole_vocab = batch.shard == nullptr ? shape.vocab : batch.shard->vocab;
  if (tile.classes.weights == nullptr) tile.classes.sum = static_cast<double>(tile.whole_vocab);
  tile.exponent_bias = batch.exponent_bias;
  tile.dependent_launches = path == Path::kHopper;
  tile.losses = batch.losses;
  tile.returns = batch.returns;
  tile.rows_redone = batch.rows_redone;
  return tile;
}

TileRows LinearCrossEntropy::DescribeTile(const Batch& batch, int64_t first, int64_t rows,
                                          const Buffers& b) const {
  TileRows tile = DescribeRows(shape_, path_, batch, first, rows);
  // Without gradients, which would want E, the sums cost no product that they do not cost anyway.
  const bool sums = !tile.gradient_wanted || tile.smoothing == Smoothing::kElementwise;
  if (path_ == Path::kHopper && sums && tile.returns.entropy != nullptr && !tile.returns.compares()) {
    tile.sums_tell_entropy = true;
    tile.smoothing = Smoothing::kElementwise;
  }
  tile.spread = path_ == Path::kHopper && SpreadsAlone(tile);
  tile.x = b.x;
  tile.scaled_x = b.scaled_x;
  b.rows.GiveTo(&tile);
  if (batch.targets.offsets != nullptr) {
    tile.target_sums = b.rows.target_sums;
    tile.target_factors = b.rows.target_factors;
  }
  return tile;
}

bool LinearCrossEntropy::Holds(const Batch& batch) const {
  if (path_ != Path::kHopper || batch.teacher != nullptr) return false;
  if (batch.kept.offsets != nullptr || batch.targets.offsets != nullptr) return false;
  if (batch.shard != nullptr && batch.shard->segments() > 1) return false;
  const TileRows tile = DescribeTile(batch, 0, 0, Buffers());
  return tile.smoothing != Smoothing::kElementwise || tile.spread;
}

Result LinearCrossEntropy::CheckHold(const Batch& batch) const {
  if (batch.hold_use == HoldUse::kNone) return {};
  const bool takes = batch.hold_use == HoldUse::kTake;
  const bool fits = batch.held_rows != nullptr || batch.first_held + batch.rows <= batch.hold->rows;
  const bool right =
      Holds(batch) && takes == HasGradients(batch) && fits && (takes || batch.held_rows == nullptr);
  return {right ? cudaSuccess : cudaErrorInvalidValue, "a batch that can be held"};
}

Result LinearCrossEntropy::CheckTargets(const Batch& batch) {
  if (batch.targets.offsets == nullptr) return {};
  const bool whole = batch.shard == nullptr || batch.shard->segments() == 1;
  const bool alone = batch.teacher == nullptr && batch.kept.offsets == nullptr;
  const bool right = whole && alone && batch.options.label_smoothing == 0;
  return {right ? cudaSuccess : cudaErrorInvalidValue, "a batch that can have soft targets on lists"};
}

bool LinearCrossEntropy::KeepsMoments(const Batch& batch) {
  return batch.returns.entropy != nullptr && !batch.returns.compares();
}

TileRows LinearCrossEntropy::PlaceTile(const Batch& batch, int64_t first, int64_t rows, Buffers* b) const {
  b->made = HasGradients(batch) ? b->exponentials : nullptr;
  b->entries = b->exponentials;
  b->sums = b->partials;
  b->sums_stride = tile_rows_;
  if (batch.hold_use == HoldUse::kNone) return DescribeTile(batch, first, rows, *b);
  const HoldSpace& space = *batch.hold;
  const int64_t row = batch.first_held + first;
  char* const held = space.exponentials + row * space.stride * SizeOf(shape_.weight_type);
  if (batch.hold_use == HoldUse::kTake) {
    b->held_rows = batch.held_rows == nullptr ? nullptr : batch.held_rows + first;
    b->first_held = row;
    b->held = b->held_rows == nullptr ? held : space.exponentials;
    const TileRows tile = DescribeTile(batch, first, rows, *b);
    if (b->held_rows == nullptr && !tile.spread) b->entries = held;
    return tile;
  }
  // What phase two will want is made where it is held.
  b->made = held;
  b->sums = space.sums + row;
  b->moments = space.moments + row;
  b->sums_stride = space.rows;
  b->rows.offsets = space.offsets + row;
  b->rows.exponents = space.exponents + row;
  b->rows.target_logits = space.target_logits + row;
  return DescribeTile(batch, first, rows, *b);
}

// Soft targets have a step of their own.
Result LinearCrossEntropy::RunDistillation(const Batch& batch, cudaStream_t stream,
                                           cudaEvent_t input_gradients) const {
  const TeacherShape teacher = batch.teacher->shape();
  const int64_t most_rows = MostRows(&teacher);
  if (most_rows == 0) return {cudaErrorInvalidValue, "a workspace for soft targets"};
  const DistillationStep step(shape_, path_, teacher, most_rows, workspace_, library_);
  return step.Run(batch, RowsPerTile(batch.rows, &teacher), stream, input_gradients, {between_, context_});
}

// A vocabulary in segments has a step of its own too.
Result LinearCrossEntropy::RunSegments(const Batch& batch, cudaStream_t stream,
                                       cudaEvent_t input_gradients) const {
  LOSSD_CUDA_PASS_ON(ShardedStep::Check(batch, shape_, path_));
  const TeacherShape shape = batch.teacher == nullptr ? TeacherShape() : batch.teacher->shape();
  const TeacherShape* const teacher = batch.teacher == nullptr ? nullptr : &shape;
  const int64_t most_rows = RowsWithin(shape_, *batch.shard, workspace_bytes_, teacher);
  if (most_rows == 0) return {cudaErrorInvalidValue, "a workspace for a vocabulary in segments"};
  ShardedStep step(shape_, batch, most_rows, workspace_, {between_, context_});
  return step.Run(RowsPerTile(batch.rows, *batch.shard, teacher), stream, input_gradients);
}

Result LinearCrossEntropy::Run(const Batch& batch, cudaStream_t stream, cudaEvent_t input_gradients,
                               Stage between, void* context) {
  between_ = between;
  context_ = context;
  LOSSD_CUDA_PASS_ON(CheckTargets(batch));
  if (batch.kept.offsets != nullptr) return RunKept(batch, stream, input_gradients);
  if (batch.shard != nullptr && batch.shard->segments() > 1) {
    return RunSegments(batch, stream, input_gradients);
  }
  if (batch.teacher != nullptr) return RunDistillation(batch, stream, input_gradients);
  LOSSD_CUDA_PASS_ON(CheckHold(batch));
  Buffers workspace;
  Divide(shape_, path_, tile_rows_, workspace_, &workspace);
  const bool hopper = path_ == Path::kHopper;
  const int64_t tile_rows = RowsPerTile(batch.rows);
  for (int64_t first = 0; first < batch.rows; first += tile_rows) {
    Buffers buffers = workspace;
    const TileRows tile = PlaceTile(batch, first, std::min(tile_rows, batch.rows - first), &buffers);
    LOSSD_CUDA_PASS_ON(PrepareRows(tile, batch.hidden_type, batch.hidden_states, stream));
    if (SmoothingOf(tile.options) == Smoothing::kRankOne) {
      LOSSD_CUDA_PASS_ON(MultiplyVocabularySum(tile, stream));
    }
    if (batch.targets.offsets != nullptr) {
      LOSSD_CUDA_PASS_ON(SumTargets(tile, TargetsOf(batch, first), stream));
    }
    Report("prepare");
    LOSSD_CUDA_PASS_ON(hopper ? HopperLosses(batch, tile, buffers, stream)
                              : PortableLosses(batch, tile, buffers, stream));
    if (batch.targets.offsets != nullptr) {
      LOSSD_CUDA_PASS_ON(PutTargetEntries(batch, first, tile, buffers, stream));
    }
    if (tile.returns.whole_row()) LOSSD_CUDA_PASS_ON(ForgetOverflowedRows(tile, stream));
    if (batch.dx != nullptr) {
      LOSSD_CUDA_PASS_ON(hopper ? HopperInputGradient(batch, tile, buffers, stream)
                                : PortableInputGradient(batch, tile, buffers, stream));
      Report("dx");
    }
    const bool last = first + tile_rows >= batch.rows;
    if (last && input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
    if (batch.weight_gradient == WeightGradient::kNone) continue;
    const bool overwrite = first == 0 && batch.weight_gradient == WeightGradient::kOverwrite;
    LOSSD_CUDA_PASS_ON(AddWeightGradient(batch, tile, buffers, overwrite, stream));
    if (tile.smoothing != Smoothing::kRankOne) continue;
    LOSSD_CUDA_PASS_ON(AddSmoothing(tile, first == 0 ? batch.smoothing_store : WeightGradient::kAccumulate,
                                    batch.smoothing_gradient, stream));
    Report("smoothing");
  }
  if (batch.rows == 0 && input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
  return {};
}

Result LinearCrossEntropy::PutTargetEntries(const Batch& batch, int64_t first, const TileRows& tile,
                                            const Buffers& b, cudaStream_t stream) const {
  if (!tile.gradient_wanted) return {};
  // The portable path's lie where logits in fp32 did.
  const int64_t stride = path_ == Path::kHopper ? b.stride : b.stride * 4 / SizeOf(shape_.weight_type);
  return PutTargets(tile, TargetsOf(batch, first), b.exponentials, stride, stream);
}

// Computes the returns that need whole logits, for as many rows at a time as fit where E will be.
Result LinearCrossEntropy::TellHopperRows(const TileRows& tile, int64_t tile_rows, const Buffers& b,
                                          cudaStream_t stream) {
  auto* logits = reinterpret_cast<float*>(b.exponentials);
  const auto most = static_cast<int32_t>(std::max<int64_t>(tile_rows / 2, 1));
  for (int32_t first = 0; first < tile.rows; first += most) {
    TileRows part = tile;
    part.rows = std::min(most, tile.rows - first);
    part.x = static_cast<char*>(tile.x) + first * tile.padded_hidden * SizeOf(tile.type);
    LOSSD_CUDA_PASS_ON(sm90::StoreLogits(part, logits, b.stride, stream));
    LOSSD_CUDA_PASS_ON(TellWholeRows(tile, first, part.rows, logits, b.stride, stream));
  }
  return {};
}

// E, or only its sums where E will be something else, and what follows from the sums.
Result LinearCrossEntropy::MultiplyHopperLogits(const TileRows& tile, Which which, const Buffers& b,
                                                cudaStream_t stream) {
  SumPieces sums{.exponentials = b.sums,
                 .tiles = static_cast<int32_t>(CeilDivide(tile.vocab, sm90::kLogitColumns)),
                 .stride = b.sums_stride};
  if (tile.smoothing == Smoothing::kElementwise && !tile.spread) {
    const sm90::EntrySums out = sm90::EntrySumsIn(b.exponentials, b.sums, tile.vocab, b.sums_stride);
    sums.logits = tile.options.softcap == 0 ? nullptr : out.logits;
    sums.moments = out.moments;
    LOSSD_CUDA_PASS_ON(sm90::SumEntries(tile, which, out, stream));
  } else {
    sums.moments = tile.spread ? b.moments : nullptr;
    const sm90::Exponentials out{b.made, b.stride, b.sums, b.sums_stride, tile.spread ? b.moments : nullptr};
    LOSSD_CUDA_PASS_ON(sm90::MultiplyLogits(tile, which, out, stream));
  }
  if (which == Which::kAll) Report("logits");
  return FinishRows(tile, which, sums, stream);
}

Result LinearCrossEntropy::FindHopperSums(const TileRows& tile, const Buffers& b, cudaStream_t stream) {
  // fp16 reaches too few powers of two for an estimate of a row's maximum.
  const Maximum maximum = tile.type == DataType::kFloat16 ? Maximum::kOfAll : Maximum::kOfSample;
  const int32_t maxima = sm90::MaximumTiles(tile.vocab, Which::kAll, maximum);
  const int32_t all_maxima = sm90::MaximumTiles(tile.vocab, Which::kRedo, Maximum::kOfAll);
  LOSSD_CUDA_PASS_ON(sm90::FindMaxima(tile, Which::kAll, maximum, b.partials, tile_rows_, stream));
  LOSSD_CUDA_PASS_ON(ChooseExponents(tile, Which::kAll, maximum, b.partials, maxima, tile_rows_, stream));
  Report("offsets");
  LOSSD_CUDA_PASS_ON(MultiplyHopperLogits(tile, Which::kAll, b, stream));
  // Rows out of range, whose number only the device knows: with none of them these end at once.
  LOSSD_CUDA_PASS_ON(GatherRedoRows(tile, stream));
  LOSSD_CUDA_PASS_ON(sm90::FindMaxima(tile, Which::kRedo, Maximum::kOfAll, b.partials, tile_rows_, stream));
  LOSSD_CUDA_PASS_ON(
      ChooseExponents(tile, Which::kRedo, Maximum::kOfAll, b.partials, all_maxima, tile_rows_, stream));
  return MultiplyHopperLogits(tile, Which::kRedo, b, stream);
}

// The same of rows whose phase one has left it: redone rows have the sums and units that they were redone
// with.
Result LinearCrossEntropy::TakeHeldSums(const Batch& batch, const TileRows& tile, const Buffers& b,
                                        cudaStream_t stream) {
  const HoldSpace& space = *batch.hold;
  const TakenRows taken{.space = &space,
                        .rows = b.held_rows,
                        .first = b.first_held,
                        .sums = b.sums,
                        .moments = tile.spread ? b.moments : nullptr,
                        .stride = b.sums_stride};
  LOSSD_CUDA_PASS_ON(TakeHeldRows(tile, taken, stream));
  const SumPieces sums{.exponentials = b.sums,
                       .moments = taken.moments,
                       .tiles = static_cast<int32_t>(space.pieces),
                       .stride = b.sums_stride};
  LOSSD_CUDA_PASS_ON(FinishRows(tile, Which::kAll, sums, stream));
  return FinishRows(tile, Which::kRedo, sums, stream);
}

Result LinearCrossEntropy::HopperLosses(const Batch& batch, const TileRows& tile, const Buffers& b,
                                        cudaStream_t stream) {
  if (tile.returns.whole_row() && !tile.sums_tell_entropy) {
    LOSSD_CUDA_PASS_ON(TellHopperRows(tile, tile_rows_, b, stream));
    Report("returns");
  }
  const bool held = batch.hold_use == HoldUse::kTake;
  LOSSD_CUDA_PASS_ON(held ? TakeHeldSums(batch, tile, b, stream) : FindHopperSums(tile, b, stream));
  Report("rows");
  if (!tile.gradient_wanted) return {};
  if (tile.smoothing == Smoothing::kElementwise && !tile.spread) {
    LOSSD_CUDA_PASS_ON(sm90::FormEntries(tile, b.exponentials, b.stride, stream));
    Report("gradients");
  } else if (b.entries == b.exponentials && (held || tile.spread)) {
    const char* const from = held ? b.held : b.exponentials;
    LOSSD_CUDA_PASS_ON(CopyEntries(tile, from, b.held_rows, b.exponentials, b.stride, stream));
    Report("gradients");
  }
  return {};
}

Result LinearCrossEntropy::HopperInputGradient(const Batch& batch, const TileRows& tile, const Buffers& b,
                                               cudaStream_t stream) {
  return sm90::MultiplyInputGradient(tile, b.entries, b.stride, batch.dx_type, batch.dx, stream);
}

LinearCrossEntropy::LogitPlaces LinearCrossEntropy::PlacesOfLogits(int32_t top_k) const {
  Buffers b;
  Divide(shape_, path_, tile_rows_, workspace_, &b);
  LogitPlaces places;
  // Hopper's tile has room for E in 16 bits.
  places.most_rows = path_ == Path::kHopper ? std::max<int64_t>(tile_rows_ / 2, 1) : tile_rows_;
  places.x = b.x;
  places.sums = reinterpret_cast<float*>(b.exponentials);
  places.stride = b.stride;
  places.top_tokens = reinterpret_cast<int32_t*>(b.x);
  places.top_logits = reinterpret_cast<float*>(b.scaled_x);
  places.log_sum_exp = b.rows.offsets;
  if (top_k > 0) {
    // No piece of a workspace is smaller than what one row's largest take.
    static_assert(Divider::kAlignment >= kMostTopK * static_cast<int64_t>(sizeof(float)));
    const int64_t bytes =
        RoundUp(tile_rows_ * PaddedHidden(shape_.hidden) * SizeOf(shape_.weight_type), Divider::kAlignment);
    places.most_rows = std::min(places.most_rows, bytes / (top_k * static_cast<int64_t>(sizeof(float))));
  }
  return places;
}

Result LinearCrossEntropy::MultiplyLogits(int64_t rows, const void* weight, cudaStream_t stream) const {
  Buffers b;
  Divide(shape_, path_, tile_rows_, workspace_, &b);
  if (path_ == Path::kPortable) {
    LOSSD_CUDA_PASS_ON(ClearRowsBehind(rows, b, stream));
    return MultiplyPortableLogits(weight, b, stream);
  }
  TileRows tile;
  tile.rows = static_cast<int32_t>(rows);
  tile.vocab = shape_.vocab;
  tile.hidden = shape_.hidden;
  tile.padded_hidden = PaddedHidden(shape_.hidden);
  tile.type = shape_.weight_type;
  tile.weight = weight;
  tile.x = b.x;
  return sm90::StoreLogits(tile, reinterpret_cast<float*>(b.exponentials), b.stride, stream);
}

// Clears the rows of x from `rows` on: products of the portable path always have all rows.
Result LinearCrossEntropy::ClearRowsBehind(int64_t rows, const Buffers& b, cudaStream_t stream) const {
  const int64_t row_bytes = PaddedHidden(shape_.hidden) * SizeOf(shape_.weight_type);
  LOSSD_CUDA_TRY(cudaMemsetAsync(b.x + rows * row_bytes, 0,
                                 static_cast<size_t>((tile_rows_ - rows) * row_bytes), stream));
  return {};
}

Result LinearCrossEntropy::PortableLosses(const Batch& batch, const TileRows& tile, const Buffers& b,
                                          cudaStream_t stream) {
  LOSSD_CUDA_PASS_ON(ClearRowsBehind(tile.rows, b, stream));
  LOSSD_CUDA_PASS_ON(MultiplyPortableLogits(batch.weight, b, stream));
  Report("logits");
  auto* logits = reinterpret_cast<float*>(b.exponentials);
  if (tile.returns.whole_row()) {
    LOSSD_CUDA_PASS_ON(TellWholeRows(tile, 0, tile.rows, logits, b.stride, stream));
    Report("returns");
  }
  LOSSD_CUDA_PASS_ON(SoftmaxRows(tile, logits, b.stride, stream));
  Report("rows");
  return {};
}

Result LinearCrossEntropy::PortableInputGradient(const Batch& batch, const TileRows& tile, const Buffers& b,
                                                 cudaStream_t stream) {
  LOSSD_CUDA_PASS_ON(MultiplyPortableInputGradient(batch.weight, b, stream));
  return FinishInputGradient(tile, b.product, batch.dx_type, batch.dx, stream);
}

// Products of the portable path always have tile_rows_ rows, so that the library chooses the same algorithm
// for them and a row's bits do not depend on the rows beside it.
Result LinearCrossEntropy::MultiplyPortableLogits(const void* weight, const Buffers& b,
                                                  cudaStream_t stream) const {
  const PortableProducts products(shape_, library_, b.library);
  return products.Logits(tile_rows_, b.x, weight, b.exponentials, b.stride, stream);
}

Result LinearCrossEntropy::MultiplyPortableInputGradient(const void* weight, const Buffers& b,
                                                         cudaStream_t stream) const {
  const PortableProducts products(shape_, library_, b.library);
  const int64_t stride = b.stride * 4 / SizeOf(shape_.weight_type);
  return products.InputGradient(tile_rows_, b.exponentials, stride, weight, b.product, stream);
}

Result LinearCrossEntropy::MultiplyPortableWeightGradient(int64_t rows, const Buffers& b,
                                                          WeightGradient gradient, float* dw,
                                                          cudaStream_t stream) const {
  const PortableProducts products(shape_, library_, b.library);
  const int64_t stride = b.stride * 4 / SizeOf(shape_.weight_type);
  return products.WeightGradient(rows, b.exponentials, stride, b.scaled_x, gradient, b.rows.factors, dw,
                                 stream);
}

Result LinearCrossEntropy::LoadLibraryProducts(const void* weight, float* dw, cudaStream_t stream) {
  if (path_ != Path::kPortable || tile_rows_ == 0) return {};
  Buffers buffers;
  Divide(shape_, path_, tile_rows_, workspace_, &buffers);
  LOSSD_CUDA_PASS_ON(MultiplyPortableLogits(weight, buffers, stream));
  LOSSD_CUDA_PASS_ON(MultiplyPortableInputGradient(weight, buffers, stream));
  if (dw == nullptr) return {};
  for (int64_t rows = 0; rows < tile_rows_;) {
    rows = PortableProducts::ReductionRows(rows + 1, tile_rows_);
    for (const WeightGradient gradient : {WeightGradient::kOverwrite, WeightGradient::kAccumulate}) {
      LOSSD_CUDA_PASS_ON(MultiplyPortableWeightGradient(rows, buffers, gradient, dw, stream));
    }
  }
  return {};
}

Result LinearCrossEntropy::LoadTeacherProducts(const void* weight, float* dw, const TeacherHead& teacher,
                                               cudaStream_t stream) {
  const TeacherShape teacher_shape = teacher.shape();
  const int64_t most_rows = MostRows(&teacher_shape);
  if (most_rows == 0) return {cudaErrorInvalidValue, "a workspace for soft targets"};
  const DistillationStep step(shape_, path_, teacher_shape, most_rows, workspace_, library_);
  return step.LoadProducts(weight, dw, teacher, stream);
}

Result LinearCrossEntropy::AddBiasGradients(const Batch& batch, const TileRows& tile, const Buffers& b,
                                            bool overwrite, cudaStream_t stream) {
  const int64_t stride = path_ == Path::kHopper ? b.stride : b.stride * 4 / SizeOf(tile.type);
  LOSSD_CUDA_PASS_ON(StoreBiasGradient(tile, b.entries, stride, overwrite, batch.db, stream));
  if (tile.bias != nullptr) Report("bias");
  return {};
}

Result LinearCrossEntropy::AddWeightGradient(const Batch& batch, const TileRows& tile, const Buffers& b,
                                             bool overwrite, cudaStream_t stream) {
  LOSSD_CUDA_PASS_ON(ScaleRows(tile, stream));
  if (path_ == Path::kHopper) {
    const sm90::Store store = overwrite ? sm90::Store::kOverwrite : sm90::Store::kAdd;
    LOSSD_CUDA_PASS_ON(sm90::MultiplyWeightGradient(tile, b.entries, b.stride, store, batch.dw, stream));
  } else {
    const int64_t rows = PortableProducts::ReductionRows(tile.rows, tile_rows_);
    const auto more = static_cast<size_t>(rows - tile.rows);
    const auto e_bytes = static_cast<size_t>(b.stride) * sizeof(float);
    const auto x_bytes = static_cast<size_t>(tile.padded_hidden * SizeOf(tile.type));
    const auto valid = static_cast<size_t>(tile.rows);
    LOSSD_CUDA_TRY(cudaMemsetAsync(b.exponentials + valid * e_bytes, 0, more * e_bytes, stream));
    LOSSD_CUDA_TRY(cudaMemsetAsync(b.scaled_x + valid * x_bytes, 0, more * x_bytes, stream));
    const auto gradient = overwrite ? WeightGradient::kOverwrite : WeightGradient::kAccumulate;
    LOSSD_CUDA_PASS_ON(MultiplyPortableWeightGradient(rows, b, gradient, batch.dw, stream));
  }
  Report("dw");
  LOSSD_CUDA_PASS_ON(AddTargets(tile, batch.dw, stream));
  Report("targets");
  return AddBiasGradients(batch, tile, b, overwrite, stream);
}

}  // namespace lossd::kernels::cuda
