#include "kernels/cuda/rows/part_returns.h"
#include "kernels/cuda/rows/row_returns.cuh"

namespace lossd::kernels::cuda {
namespace {

__global__ void FindLabelLogitsKernel(const TileRows tile, const PartOfRows rows, const RowPieces pieces) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= pieces.rows()) return;
  const int32_t label = tile.labels[rows.first + i];
  const Logits logits{rows.sums + i * rows.stride, tile.bias, tile.options};
  pieces.labels()[static_cast<int64_t>(rows.part) * pieces.rows() + i] =
      IsOwn(tile, label) ? logits[label] : -kInfinity;
}

// One part has the label.
__device__ float LabelLogit(const RowPieces& pieces, int32_t i) {
  float logit = -kInfinity;
  for (int32_t p = 0; p < pieces.parts(); ++p) {
    logit = fmaxf(logit, pieces.labels()[static_cast<int64_t>(p) * pieces.rows() + i]);
  }
  return logit;
}

__global__ void FindRowPartsKernel(const TileRows tile, const PartOfRows rows, const RowPieces pieces,
                                   bool ranked) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x);
  const Logits logits{rows.sums + i * rows.stride, tile.bias, tile.options};
  const float of_label = ranked ? LabelLogit(pieces, i) : kInfinity;
  RowPart found = FindRowPart(logits, tile.vocab, tile.labels[rows.first + i], of_label);
  if (found.token >= 0) found.token += static_cast<int32_t>(rows.first_entry);
  if (threadIdx.x == 0) pieces.RowsOf(rows.part)[i] = found;
  const int32_t top_k = pieces.top_k();
  if (top_k == 0) return;
  Key* const keys = pieces.KeysOf(rows.part) + static_cast<int64_t>(i) * top_k;
  const auto count = static_cast<int32_t>(min(static_cast<int64_t>(top_k), tile.vocab));
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread >= count && thread < top_k) keys[thread] = 0;
  if (count == 0) return;
  ForEachLargest(logits, tile.vocab, count,
                 [&](int32_t place, Key key) { keys[place] = Renumbered(key, rows.first_entry); });
}
static_assert(kMostTopK <= kThreads);

__global__ void TellRowPartsKernel(const TileRows tile, int32_t first, const RowPieces pieces) {
  AwaitPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x);
  const int32_t place = tile.batch_rows[first + i];
  RowPart parts[kMostParts];
  for (int32_t p = 0; p < pieces.parts(); ++p) parts[p] = pieces.RowsOf(p)[i];
  const RowPart row = MergeRowParts(parts, pieces.parts());
  if (threadIdx.x == 0) TellRow(tile.returns, place, row);
  const int32_t top_k = pieces.top_k();
  const double log_sum = log(row.sum);
  const Key* const keys = pieces.KeysOf(0) + static_cast<int64_t>(i) * top_k;
  for (auto k = static_cast<int32_t>(threadIdx.x); k < pieces.parts() * top_k;
       k += static_cast<int32_t>(blockDim.x)) {
    const int32_t part = k / top_k;
    const int32_t of_part = k - part * top_k;
    const Key key = keys[part * pieces.KeyStride() + of_part];
    if (key == 0) continue;
    const int32_t rank = PlaceOfKey(keys, pieces.KeyStride(), pieces.parts(), top_k, part, of_part);
    if (rank < top_k) TellTop(tile.returns, place, rank, key, row.largest, log_sum);
  }
}
constexpr unsigned kTellThreads = 64;

}  // namespace

Result FindLabelLogits(const TileRows& tile, const PartOfRows& rows, const RowPieces& pieces,
                       cudaStream_t stream) {
  return LaunchRows("FindLabelLogits", {Blocks(pieces.rows(), kThreads)}, tile, stream, FindLabelLogitsKernel,
                    rows, pieces);
}

Result FindRowParts(const TileRows& tile, const PartOfRows& rows, const RowPieces& pieces, bool ranked,
                    cudaStream_t stream) {
  return LaunchRows("FindRowParts", {Blocks(pieces.rows(), 1)}, tile, stream, FindRowPartsKernel, rows,
                    pieces, ranked);
}

Result TellRowParts(const TileRows& tile, int32_t first, const RowPieces& pieces, cudaStream_t stream) {
  return LaunchRows("TellRowParts", {Blocks(pieces.rows(), 1), kTellThreads}, tile, stream,
                    TellRowPartsKernel, first, pieces);
}

Result LoadPartReturnKernels() {
  KernelLoader loader;
  loader.Add(&FindLabelLogitsKernel);
  loader.Add(&FindRowPartsKernel);
  loader.Add(&TellRowPartsKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
