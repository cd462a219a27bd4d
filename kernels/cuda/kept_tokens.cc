// Batches of the step of linear_cross_entropy.h whose rows have lists of kept tokens.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cuda/kept_step.h"
#include "kernels/cuda/linear_cross_entropy.h"
#include "kernels/cuda/rows/kept_rows.h"
#include "kernels/cuda/rows/long_lists.h"
#include "kernels/cuda/sm90/products.h"
#include "kernels/cuda/step_buffers.h"

namespace lossd::kernels::cuda {

void LinearCrossEntropy::CutLists(BatchRows* batch) const {
  batch->by_label.resize(static_cast<size_t>(batch->rows));  // of no use where lists are short
  const auto short_lists =
      std::span(batch->kept.offsets).first(static_cast<size_t>(batch->kept.short_rows) + 1);
  std::vector<KeptTile> tiles = KeptStep::Cut(shape_, short_lists, workspace_bytes_);
  // Without tiles Run refuses the batch.
  if (!tiles.empty() || batch->kept.short_rows == 0) CutLongLists(batch, &tiles);
  OrderByToken(shape_.vocab, std::move(tiles), &batch->kept);
}

void LinearCrossEntropy::CutLongLists(BatchRows* batch, std::vector<KeptTile>* tiles) const {
  const LongListPlaces places = PlacesOfLongLists();
  const std::vector<int32_t>& offsets = batch->kept.offsets;
  for (int64_t row = batch->kept.short_rows; row < batch->rows;) {
    KeptTile& tile = tiles->emplace_back(
        KeptTile{.is_long = true, .first_row = row, .first_entry = offsets[static_cast<size_t>(row)]});
    const auto fits = [&](int64_t end) {
      return end <= batch->rows && end - tile.first_row <= places.rows &&
             offsets[static_cast<size_t>(end)] - tile.first_entry <= places.entries;
    };
    while (fits(row + 1)) ++row;
    tile.rows = row - tile.first_row;
    tile.entries = offsets[static_cast<size_t>(row)] - tile.first_entry;
    OrderByLabel(tile.first_row, tile.rows, batch);
  }
}

bool LinearCrossEntropy::HasRoomForList(int64_t tokens) const {
  if (tokens >= LongList() && PlacesOfLongLists().rows > 0) return true;
  return KeptStep::WorkspaceBytes(shape_, 1, tokens) <= workspace_bytes_;
}

LinearCrossEntropy::LongListPlaces LinearCrossEntropy::PlacesOfLongLists() const {
  Buffers buffers;
  Divide(shape_, path_, tile_rows_, workspace_, &buffers);
  return PlacesOfLongLists(buffers);
}

// A list has as many tokens as a row of logits has values at most. Where E of a tile is, Hopper's path has
// half of the rows, an eighth of their logits at a time and the values; the portable one has logits of all
// rows and their entries in the same place, and the values behind them.
LinearCrossEntropy::LongListPlaces LinearCrossEntropy::PlacesOfLongLists(const Buffers& b) const {
  LongListPlaces places;
  const bool hopper = path_ == Path::kHopper;
  const int64_t rows = hopper ? tile_rows_ / 2 : tile_rows_ * 3 / 4;
  places.logit_rows = hopper ? tile_rows_ / 8 : tile_rows_;
  const int64_t value_rows = hopper ? tile_rows_ / 8 : tile_rows_ - rows;
  if (places.logit_rows == 0 || value_rows == 0) return {};
  places.rows = rows > kWholeRows ? rows / kWholeRows * kWholeRows : rows;
  places.entries = value_rows * b.stride;
  // Logits begin where 32 bytes do.
  const int64_t entry_rows = hopper ? RoundUp(places.rows, 2) : 0;
  places.logits =
      reinterpret_cast<float*>(b.exponentials + entry_rows * b.stride * SizeOf(shape_.weight_type));
  places.values = places.logits + (hopper ? places.logit_rows : rows) * b.stride;
  return places;
}

Result LinearCrossEntropy::RunKept(const Batch& batch, cudaStream_t stream, cudaEvent_t input_gradients) {
  if (batch.rows > 0 && batch.kept.tiles.empty()) {
    return {cudaErrorInvalidValue, "a workspace for lists of tokens"};
  }
  if (batch.rows > 0 && batch.weight_gradient == WeightGradient::kOverwrite) {
    LOSSD_CUDA_PASS_ON(ClearGradients(batch, stream));
    Report("clear");
  }
  const KeptStep gathered(shape_, path_, workspace_, workspace_bytes_);
  for (const KeptTile& tile : batch.kept.tiles) {
    const cudaEvent_t last = &tile == &batch.kept.tiles.back() ? input_gradients : nullptr;
    LOSSD_CUDA_PASS_ON(tile.is_long ? RunLongLists(batch, tile, stream, last)
                                    : gathered.Run(batch, tile, stream, last, {between_, context_}));
  }
  if (batch.rows == 0 && input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
  return {};
}

Result LinearCrossEntropy::ClearGradients(const Batch& batch, cudaStream_t stream) const {
  const auto bytes = static_cast<size_t>(shape_.vocab * PaddedHidden(shape_.hidden)) * sizeof(float);
  LOSSD_CUDA_TRY(cudaMemsetAsync(batch.dw, 0, bytes, stream));
  if (batch.db == nullptr) return {};
  LOSSD_CUDA_TRY(cudaMemsetAsync(batch.db, 0, static_cast<size_t>(shape_.vocab) * sizeof(float), stream));
  return {};
}

// The products are those of a step without lists; what is between them is the lists'.
Result LinearCrossEntropy::RunLongLists(const Batch& batch, const KeptTile& of, cudaStream_t stream,
                                        cudaEvent_t input_gradients) {
  Buffers b;
  Divide(shape_, path_, tile_rows_, workspace_, &b);
  b.entries = b.exponentials;
  TileRows tile = DescribeTile(batch, of.first_row, of.rows, b);
  tile.smoothing = Smoothing::kNone;
  tile.sums_tell_entropy = false;
  tile.spread = false;
  const KeptLists lists{.offsets = batch.kept.offsets + of.first_row,
                        .tokens = batch.kept.tokens,
                        .first_entry = of.first_entry,
                        .values = PlacesOfLongLists(b).values};
  LOSSD_CUDA_PASS_ON(PrepareRows(tile, batch.hidden_type, batch.hidden_states, stream));
  Report("prepare");
  LOSSD_CUDA_PASS_ON(PickLongLists(batch, tile, lists, b, stream));
  Report("logits");
  LOSSD_CUDA_PASS_ON(FinishLists(tile, lists, stream));
  Report("rows");
  if (tile.gradient_wanted) {
    const int64_t stride = path_ == Path::kHopper ? b.stride : b.stride * 4 / SizeOf(shape_.weight_type);
    LOSSD_CUDA_PASS_ON(SpreadLists(tile, lists, b.exponentials, stride, stream));
    Report("gradients");
  }
  if (batch.dx != nullptr) {
    LOSSD_CUDA_PASS_ON(path_ == Path::kHopper ? HopperInputGradient(batch, tile, b, stream)
                                              : PortableInputGradient(batch, tile, b, stream));
    Report("dx");
  }
  if (input_gradients != nullptr) LOSSD_CUDA_TRY(cudaEventRecord(input_gradients, stream));
  if (batch.weight_gradient == WeightGradient::kNone) return {};
  return AddWeightGradient(batch, tile, b, /*overwrite=*/false, stream);
}

Result LinearCrossEntropy::PickLongLists(const Batch& batch, const TileRows& tile, const KeptLists& lists,
                                         const Buffers& b, cudaStream_t stream) const {
  const LongListPlaces places = PlacesOfLongLists(b);
  if (path_ == Path::kPortable) {
    LOSSD_CUDA_PASS_ON(ClearRowsBehind(tile.rows, b, stream));
    LOSSD_CUDA_PASS_ON(MultiplyPortableLogits(batch.weight, b, stream));
    return PickLogits(tile, lists, 0, tile.rows, places.logits, b.stride, stream);
  }
  const auto most = static_cast<int32_t>(places.logit_rows);
  for (int32_t first = 0; first < tile.rows; first += most) {
    TileRows part = tile;
    part.rows = std::min(most, tile.rows - first);
    part.x = static_cast<char*>(tile.x) + first * tile.padded_hidden * SizeOf(tile.type);
    LOSSD_CUDA_PASS_ON(sm90::StoreLogits(part, places.logits, b.stride, stream));
    LOSSD_CUDA_PASS_ON(PickLogits(tile, lists, first, part.rows, places.logits, b.stride, stream));
  }
  return {};
}

}  // namespace lossd::kernels::cuda
