#include <algorithm>
#include <cmath>

#include "kernels/cuda/rows/kept_rows.h"
#include "kernels/cuda/rows/listed_logit.cuh"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kColumns = 8;         // of a thread: Eight
constexpr int kGatherTogether = 4;  // rows of the weights that a warp reads at once
constexpr int kSumTogether = 8;     // rows that a thread has under way

template <class T>
__device__ const T* WeightRow(const TileRows& tile, int32_t token) {
  return static_cast<const T*>(tile.weight) + static_cast<int64_t>(token) * tile.padded_hidden;
}

template <class T>
__device__ const T* StatesOf(const TileRows& tile, int32_t row) {
  return static_cast<const T*>(tile.x) + static_cast<int64_t>(row) * tile.padded_hidden;
}

template <class T>
__device__ Eight<T> EightAt(const T* from) {
  return *reinterpret_cast<const Eight<T>*>(from);
}

template <class T>
__device__ void AddEight(float factor, const Eight<T>& from, float (&sums)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) sums[k] = __fmaf_rn(factor, Widen(from.values[k]), sums[k]);
}

// A block has a row. The order of an entry's sum does not depend on which warp has it.
template <class T>
__global__ void __launch_bounds__(kThreads) GatherLogitsKernel(const TileRows tile, const KeptLists lists) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t end = lists.offsets[row + 1];
  const auto warp = static_cast<int32_t>(threadIdx.x / kWarp);
  const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
  const T* x = StatesOf<T>(tile, row);
  for (int32_t first = lists.offsets[row] + warp * kGatherTogether; first < end;
       first += kWarps * kGatherTogether) {
    int32_t tokens[kGatherTogether];
    const T* rows[kGatherTogether];
    float sums[kGatherTogether] = {};
#pragma unroll
    for (int i = 0; i < kGatherTogether; ++i) {
      tokens[i] = lists.tokens[min(first + i, end - 1)];
      rows[i] = WeightRow<T>(tile, tokens[i]);
    }
#pragma unroll 2
    for (int64_t h = kColumns * lane; h < tile.padded_hidden; h += kColumns * kWarp) {
      const Eight<T> of_x = EightAt(x + h);
      Eight<T> weights[kGatherTogether];
#pragma unroll
      for (int i = 0; i < kGatherTogether; ++i) weights[i] = EightAt(rows[i] + h);
#pragma unroll
      for (int i = 0; i < kGatherTogether; ++i) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          sums[i] = __fmaf_rn(Widen(weights[i].values[k]), Widen(of_x.values[k]), sums[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kGatherTogether; ++i) {
      double sum = SumOfWarp(static_cast<double>(sums[i]));
      if (lane != 0 || first + i >= end) continue;
      if (tile.bias != nullptr) sum += tile.bias[tokens[i]];
      const int64_t at = first + i - lists.first_entry;
      lists.values[at] = static_cast<float>(sum * tile.options.logit_scale);
      if (lists.rows != nullptr) lists.rows[at] = row;
    }
  }
}

// A row's list as one warp sees it.
struct List {
  const int32_t* tokens;
  float* values;
  int32_t size;
  int32_t lane;
};

// The largest logit, of the lowest token that has it; and the label's.
struct Extremes {
  double largest = -INFINITY;
  int32_t token = 0x7FFFFFFF;
  double label_logit = -INFINITY;
  double label_slope = 0;
};

__device__ Extremes FindExtremes(const TileRows& tile, const List& list, int32_t label) {
  Extremes found;
  for (int32_t i = list.lane; i < list.size; i += kWarp) {
    const CappedLogit<double> logit = Capped(tile, list.values[i]);
    const int32_t token = list.tokens[i];
    if (token == label) {
      found.label_logit = logit.value;
      found.label_slope = logit.slope;
    }
    if (logit.value > found.largest || (logit.value == found.largest && token < found.token)) {
      found.largest = logit.value;
      found.token = token;
    }
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const double largest = __shfl_xor_sync(0xFFFFFFFF, found.largest, distance);
    const int32_t token = __shfl_xor_sync(0xFFFFFFFF, found.token, distance);
    if (largest > found.largest || (largest == found.largest && token < found.token)) {
      found.largest = largest;
      found.token = token;
    }
    found.label_logit = fmax(found.label_logit, __shfl_xor_sync(0xFFFFFFFF, found.label_logit, distance));
    found.label_slope += __shfl_xor_sync(0xFFFFFFFF, found.label_slope, distance);
  }
  return found;
}

struct ListSums {
  RowSums row;        // of e^(s - m)
  double rest = 0;    // Σ e^(s - m) without the largest one's
  int32_t above = 0;  // logits above the label's
};

__device__ ListSums SumList(const TileRows& tile, const List& list, const Extremes& extremes, int32_t label) {
  ListSums sums;
  for (int32_t i = list.lane; i < list.size; i += kWarp) {
    const double s = Capped(tile, list.values[i]).value;
    const double e = exp(s - extremes.largest);
    if (list.tokens[i] != extremes.token) sums.rest += e;
    if (list.tokens[i] == label) continue;
    sums.row.others += e;
    if (e > 0) sums.row.moment += e * (s - extremes.largest);
    sums.above += s > extremes.label_logit ? 1 : 0;
  }
  sums.row.others = SumOfWarp(sums.row.others);
  sums.row.moment = SumOfWarp(sums.row.moment);
  sums.rest = SumOfWarp(sums.rest);
  sums.above = __reduce_add_sync(0xFFFFFFFF, sums.above);
  sums.row.own = exp(extremes.label_logit - extremes.largest);
  return sums;
}

// What the products for dX and dW take. Those of a row that overflowed are 0.
__device__ void FormFactors(const TileRows& tile, int32_t row, const List& list, const Extremes& extremes,
                            const ListSums& sums, double moment, const RowOutcome& out) {
  const double sum = sums.row.others + sums.row.own;
  const double token_weight = tile.token_weights == nullptr ? 1.0 : tile.token_weights[row];
  const int32_t label = tile.labels[row];
  const GradientTerms terms =
      GradientTermsOf(tile, row, token_weight, 1.0, ClassWeight(tile, label), log(sum) + extremes.largest);
  const double mean = moment / sum;
  for (int32_t i = list.lane; i < list.size; i += kWarp) {
    const CappedLogit<double> logit = Capped(tile, list.values[i]);
    const double below = logit.value - extremes.largest;
    const double p = exp(below) / sum;
    const double slope = p > 0 ? (terms.alpha - terms.delta * (below - mean)) * p : 0;
    const double factor = tile.options.logit_scale * logit.slope * slope;
    list.values[i] = out.overflowed            ? 0.0f
                     : list.tokens[i] == label ? out.target_gradient
                                               : static_cast<float>(factor);
  }
}

// What FinishRow leaves to whoever has compared the logits.
__device__ void TellList(const TileRows& tile, int32_t place, const Extremes& extremes, const ListSums& sums,
                         double moment, bool overflowed) {
  const RowReturns& returns = tile.returns;
  if (returns.entropy != nullptr) {
    const double entropy = log1p(sums.rest) - moment / (sums.row.others + sums.row.own);
    returns.entropy[place] = overflowed ? NaN() : static_cast<float>(entropy);
  }
  if (returns.prediction != nullptr) returns.prediction[place] = overflowed ? -1 : extremes.token;
  if (returns.target_rank != nullptr) returns.target_rank[place] = overflowed ? -1 : sums.above;
}

// A warp has a row.
__global__ void __launch_bounds__(kThreads) FinishListsKernel(const TileRows tile, const KeptLists lists) {
  const auto row = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / kWarp);
  if (row >= tile.rows) return;
  const int32_t begin = lists.offsets[row];
  const List list{lists.tokens + begin, lists.values + (begin - lists.first_entry),
                  lists.offsets[row + 1] - begin, static_cast<int32_t>(threadIdx.x % kWarp)};
  const int32_t label = tile.labels[row];
  const Extremes extremes = FindExtremes(tile, list, label);
  const ListSums sums = SumList(tile, list, extremes, label);
  const double m = extremes.largest;
  const RowUnits units{
      m, 0, static_cast<float>(extremes.label_logit), static_cast<float>(extremes.label_slope), 1.0, m};
  const double own_moment = sums.row.own > 0 ? sums.row.own * (extremes.label_logit - m) : 0;
  const double moment = sums.row.moment + own_moment;
  const RowOutcome out = FinishRow(tile, row, sums.row, units);
  if (tile.gradient_wanted) FormFactors(tile, row, list, extremes, sums, moment, out);
  __syncwarp();  // all have read whether it had overflowed before
  if (list.lane != 0) return;
  WriteReturns(tile, row, out);
  TellList(tile, tile.batch_rows[row], extremes, sums, moment, out.overflowed);
  tile.overflowed[row] = out.overflowed ? 1 : 0;
}

// Entries that a block works on together: a factor, and where the row is that it multiplies.
struct Staged {
  float factors[kThreads];
  int32_t rows[kThreads];
};

// sums += Σ factors rows over `count` staged entries, in order, of the columns from `h` on. `source` gives
// the row of a place, kSumTogether of them at a time; those behind the last have factor 0.
template <class T, class Source>
__device__ void AddStaged(const Staged& staged, int32_t count, int64_t h, const Source& source,
                          float (&sums)[kColumns]) {
  for (int32_t first = 0; first < count; first += kSumTogether) {
    Eight<T> rows[kSumTogether];
#pragma unroll
    for (int i = 0; i < kSumTogether; ++i) {
      rows[i] = EightAt(source(staged.rows[min(first + i, count - 1)]) + h);
    }
#pragma unroll
    for (int i = 0; i < kSumTogether; ++i) {
      if (first + i < count) AddEight(staged.factors[first + i], rows[i], sums);
    }
  }
}

template <class T, class TOut>
__global__ void __launch_bounds__(kThreads)
    SumListsKernel(const TileRows tile, const KeptLists lists, TOut* out) {
  __shared__ Staged staged;
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int64_t h = kColumns * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  const bool overflowed = tile.overflowed[row] != 0;
  const int32_t end = overflowed ? 0 : lists.offsets[row + 1];
  float sums[kColumns] = {};
  for (int32_t first = lists.offsets[row]; first < end; first += static_cast<int32_t>(blockDim.x)) {
    const int32_t count = min(static_cast<int32_t>(blockDim.x), end - first);
    const auto at = static_cast<int32_t>(threadIdx.x);
    __syncthreads();
    if (at < count) {
      staged.factors[at] = lists.values[first + at - lists.first_entry];
      staged.rows[at] = lists.tokens[first + at];
    }
    __syncthreads();
    if (h >= tile.padded_hidden) continue;
    AddStaged<T>(
        staged, count, h, [&](int32_t token) { return WeightRow<T>(tile, token); }, sums);
  }
  TOut* to = out + static_cast<int64_t>(tile.batch_rows[row]) * tile.hidden + h;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    if (h + k < tile.hidden) to[k] = static_cast<TOut>(overflowed ? NaN() : sums[k]);
  }
}

// A block has a token and some columns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    AddListsKernel(const TileRows tile, const KeptLists lists, float* dw, float* db) {
  __shared__ Staged staged;
  const int32_t begin = lists.token_starts[blockIdx.x];
  const int32_t end = lists.token_starts[blockIdx.x + 1];
  const int32_t token = lists.tokens[lists.by_token[begin]];
  const int64_t h = kColumns * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  const bool adds_bias = db != nullptr && blockIdx.y == 0 && threadIdx.x == 0;
  float sums[kColumns] = {};
  float bias_sum = 0;
  for (int32_t first = begin; first < end; first += static_cast<int32_t>(blockDim.x)) {
    const int32_t count = min(static_cast<int32_t>(blockDim.x), end - first);
    const auto at = static_cast<int32_t>(threadIdx.x);
    __syncthreads();
    if (at < count) {
      const int64_t entry = lists.by_token[first + at] - lists.first_entry;
      const int32_t row = lists.rows[entry];
      staged.rows[at] = row;
      staged.factors[at] = lists.values[entry] * ShareOf(tile, row);
    }
    __syncthreads();
    for (int32_t i = 0; adds_bias && i < count; ++i) bias_sum += staged.factors[i];
    if (h >= tile.padded_hidden) continue;
    AddStaged<T>(
        staged, count, h, [&](int32_t row) { return StatesOf<T>(tile, row); }, sums);
  }
  if (adds_bias) db[token] += bias_sum;
  if (h >= tile.padded_hidden) return;
  auto* to = reinterpret_cast<Eight<float>*>(dw + static_cast<int64_t>(token) * tile.padded_hidden + h);
  Eight<float> total = *to;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) total.values[k] += sums[k];
  *to = total;
}

// Threads of a block that adds to dW. Blocks of the same columns run one behind the other, and those columns
// of a tile's x are to stay in the second cache meanwhile: 1024 of 16384 rows in 16 bits are 32 MiB.
constexpr int kAddThreads = 128;

// As many threads as a row has pieces, up to `most`, and as many blocks as that leaves.
struct ColumnGrid {
  unsigned threads;
  unsigned blocks;
};
ColumnGrid ColumnsOf(const TileRows& tile, int64_t most) {
  const int64_t pieces = tile.padded_hidden / kColumns;
  const auto threads = static_cast<unsigned>(std::min<int64_t>(RoundUp(pieces, kWarp), most));
  return {threads, Blocks(pieces, threads)};
}

}  // namespace

Result GatherLogits(const TileRows& tile, const KeptLists& lists, cudaStream_t stream) {
  WithType(tile.type, [&](auto type) {
    GatherLogitsKernel<decltype(type)><<<Blocks(tile.rows, 1), kThreads, 0, stream>>>(tile, lists);
  });
  return {cudaGetLastError(), "GatherLogits"};
}

Result FinishLists(const TileRows& tile, const KeptLists& lists, cudaStream_t stream) {
  FinishListsKernel<<<Blocks(tile.rows, kWarps), kThreads, 0, stream>>>(tile, lists);
  return {cudaGetLastError(), "FinishLists"};
}

Result SumLists(const TileRows& tile, const KeptLists& lists, DataType out_type, void* out,
                cudaStream_t stream) {
  const ColumnGrid columns = ColumnsOf(tile, kThreads);
  const dim3 grid(Blocks(tile.rows, 1), columns.blocks);
  WithType(tile.type, [&](auto type) {
    WithType(out_type, [&](auto to) {
      using To = decltype(to);
      SumListsKernel<decltype(type), To>
          <<<grid, columns.threads, 0, stream>>>(tile, lists, static_cast<To*>(out));
    });
  });
  return {cudaGetLastError(), "SumLists"};
}

Result AddLists(const TileRows& tile, const KeptLists& lists, float* dw, float* db, cudaStream_t stream) {
  if (lists.different_tokens == 0) return {};
  const ColumnGrid columns = ColumnsOf(tile, kAddThreads);
  const dim3 grid(Blocks(lists.different_tokens, 1), columns.blocks);
  WithType(tile.type, [&](auto type) {
    AddListsKernel<decltype(type)><<<grid, columns.threads, 0, stream>>>(tile, lists, dw, db);
  });
  return {cudaGetLastError(), "AddLists"};
}

Result LoadKeptKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&](auto type) {
    using T = decltype(type);
    for (const DataType out_type : kDataTypes) {
      WithType(out_type, [&](auto out) { loader.Add(&SumListsKernel<T, decltype(out)>); });
    }
    loader.Add(&GatherLogitsKernel<T>);
    loader.Add(&AddListsKernel<T>);
  });
  loader.Add(&FinishListsKernel);
  return loader.result();
}

}  // namespace lossd::kernels::cuda
