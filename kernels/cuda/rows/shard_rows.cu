#include "kernels/cuda/rows/row_kernels.cuh"
#include "kernels/cuda/rows/shard_rows.h"

namespace lossd::kernels::cuda {
namespace {

constexpr double kLn2 = 0.693147180559945309417;
constexpr int kMergeThreads = 128;
constexpr int kAddThreads = 256;
constexpr unsigned kMostAddBlocks = 1024;

__device__ float4 operator+(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

// Makes those of the tree's additions that `sums` says.
template <int kIndex = 0, class Value, int kMost>
__device__ void AddInTree(Value (&values)[kMost], SegmentBits sums) {
  constexpr SegmentSum kSum = kSegmentTree[kIndex];
  if constexpr (kSum.right < kMost) {
    if (Has(sums, kIndex)) values[kSum.left] = values[kSum.left] + values[kSum.right];
  }
  if constexpr (kIndex + 1 < kSegmentSums) AddInTree<kIndex + 1>(values, sums);
}

__global__ void PlaceLabelsKernel(const int32_t* labels, int32_t rows, int64_t first_entry, int64_t vocab,
                                  const PlacedLabels out) {
  const auto row = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (row >= rows) return;
  const int64_t label = labels[row] - first_entry;
  out.labels[row] = static_cast<int32_t>(label);
  out.weight_rows[row] = label >= 0 && label < vocab ? static_cast<int32_t>(label) : 0;
  out.places[row] = row;
}

// What one segment's sums are times to be in another's units. The same offsets, as they are in almost all
// rows, give a power of two.
__device__ double Ratio(const ShardStatistics& from, const ShardStatistics& to) {
  const int32_t exponent = from.exponent - to.exponent;
  if (from.offset == to.offset) return ldexp(1.0, exponent);
  return exp(static_cast<double>(from.offset) - static_cast<double>(to.offset) + exponent * kLn2);
}

// A row's statistics, one a segment, and what is computed of them.
struct MergedRow {
  RowSums sums;
  int32_t largest = 0;  // the segment whose sum is the largest: sums are in its units
  int32_t owner = 0;    // the segment that has the label
  bool overflowed = false;
};

__device__ MergedRow Merge(const ShardStatistics (&of_segments)[kFixedSegments],
                           const MergedSegments& segments) {
  MergedRow row;
  double own[kFixedSegments] = {};
  double most = -__int_as_float(0x7F800000);
  for (int32_t s = 0; s < segments.segments; ++s) {
    if (!Has(segments.with_entries, s)) continue;
    const ShardStatistics& of_segment = of_segments[s];
    row.overflowed = row.overflowed || of_segment.others < 0;
    if (of_segment.has_label != 0) {
      row.owner = s;
      own[s] =
          OwnExponential(ScaledExponential(of_segment.offset, of_segment.exponent), of_segment.target_logit);
    }
    const double size = log(of_segment.others + own[s]) + of_segment.exponent * kLn2 + of_segment.offset;
    if (size > most) {
      most = size;
      row.largest = s;
    }
  }
  double others[kFixedSegments] = {};
  double smoothing[kFixedSegments] = {};
  double moments[kFixedSegments] = {};
  for (int32_t s = 0; s < segments.segments; ++s) {
    if (!Has(segments.with_entries, s)) continue;
    const ShardStatistics& of_segment = of_segments[s];
    const double ratio = Ratio(of_segment, of_segments[row.largest]);
    others[s] = of_segment.others > 0 ? of_segment.others * ratio : 0;
    if (own[s] > 0) row.sums.own = own[s] * ratio;
    smoothing[s] = of_segment.smoothing_sum;
    const double shift =
        static_cast<double>(of_segment.offset) - static_cast<double>(of_segments[row.largest].offset);
    if (of_segment.others > 0) moments[s] = ratio * (of_segment.moment + shift * of_segment.others);
  }
  AddInTree(others, segments.sums);
  AddInTree(smoothing, segments.sums);
  AddInTree(moments, segments.sums);
  row.sums.others = others[0];
  row.sums.smoothing_sum = smoothing[0];
  row.sums.moment = moments[0];
  return row;
}

__global__ void SplitRowsKernel(const TileRows tile, const OwnSegments segments, const PlacedLabels labels) {
  const auto row = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (row >= tile.rows) return;
  // What is read here is written over by the first segment's.
  const int64_t label = labels.labels[row];
  const float logit = tile.target_logits[row];
  const float slope = tile.options.softcap != 0 ? tile.target_slopes[row] : 1.0f;
  const float largest = tile.largest[row];
  const int32_t overflowed = tile.overflowed[row];
  for (int32_t i = 0; i < segments.count; ++i) {
    const int64_t behind = i * segments.stride;
    const int64_t first = segments.borders[i];
    const bool is_own = label >= first && label < segments.borders[i + 1];
    labels.labels[row + behind] = static_cast<int32_t>(label - first);
    labels.weight_rows[row + behind] = is_own ? static_cast<int32_t>(label - first) : 0;
    tile.target_logits[row + behind] = is_own ? logit : -__int_as_float(0x7F800000);
    if (tile.options.softcap != 0) tile.target_slopes[row + behind] = slope;
    tile.largest[row + behind] = largest;
    tile.overflowed[row + behind] = overflowed;
    if (row == 0) tile.redo_count[behind] = 0;
  }
}

__global__ void __launch_bounds__(kMergeThreads)
    MergeRowsKernel(const TileRows tile, const ShardStatistics* statistics, const MergedSegments segments) {
  const auto row = static_cast<int32_t>(blockIdx.x * kMergeThreads + threadIdx.x);
  if (row >= tile.rows) return;
  ShardStatistics of_segments[kFixedSegments];
  for (int32_t s = 0; s < segments.segments; ++s) {
    if (Has(segments.with_entries, s)) of_segments[s] = statistics[static_cast<int64_t>(s) * tile.rows + row];
  }
  const MergedRow merged = Merge(of_segments, segments);
  const ShardStatistics& unit = of_segments[merged.largest];
  RowUnits units{unit.offset,
                 unit.exponent,
                 of_segments[merged.owner].target_logit,
                 of_segments[merged.owner].target_slope,
                 1.0,
                 unit.offset};
  tile.overflowed[row] = merged.overflowed ? 1 : 0;
  RowOutcome outcome{};
  bool overflowed = merged.overflowed;
  int32_t place = row;
  for (int32_t s = 0; s < segments.segments; ++s) {
    if (!Has(segments.with_entries, s)) continue;
    units.own = 1.0 / Ratio(of_segments[s], unit);
    units.own_offset = of_segments[s].offset;
    outcome = FinishRow(tile, row, merged.sums, units);
    overflowed = overflowed || outcome.overflowed;
    if (!Has(segments.own, s)) continue;
    RowOutcome own = outcome;
    if (merged.owner != s) own.target_gradient = 0.0f;
    WriteFactors(tile, place, own);
    place += segments.stride;
  }
  // Whether v is in range differs between segments, as their units do, but what follows must not.
  if (overflowed) {
    outcome = OverflowedRow();
    for (place -= segments.stride; place >= row; place -= segments.stride) WriteFactors(tile, place, outcome);
  }
  WriteReturns(tile, row, outcome);
}

template <class Value>
__device__ Value Load(const float* from, int64_t place) {
  return __ldcs(reinterpret_cast<const Value*>(from) + place);
}

template <class T>
__device__ void Store(T* to, int64_t place, float value) {
  to[place] = static_cast<T>(value);
}
template <class T>
__device__ void Store(T* to, int64_t place, float4 value) {
  struct alignas(4 * sizeof(T)) Four {
    T values[4];
  };
  reinterpret_cast<Four*>(to)[place] = {static_cast<T>(value.x), static_cast<T>(value.y),
                                        static_cast<T>(value.z), static_cast<T>(value.w)};
}

// The parts that there are.
template <class Value, int kSegments>
__device__ void LoadParts(const InputGradientParts& parts, int64_t element, Value (&values)[kSegments]) {
#pragma unroll
  for (int s = 0; s < kSegments; ++s) {
    if (parts.of[s] != nullptr) values[s] = Load<Value>(parts.of[s], element);
  }
}

// Rows are `columns` Values. kSegments: at least as many as there are. A thread reads some elements before it
// uses any, because there are few threads to wait for memory.
template <int kSegments, class T, class Value>
__global__ void __launch_bounds__(kAddThreads)
    AddInputGradientsKernel(const TileRows tile, const InputGradientParts parts, uint32_t columns, T* out) {
  constexpr uint32_t kAhead = kSegments == 2 ? 4 : 1;
  const uint32_t elements = static_cast<uint32_t>(tile.rows) * columns;
  const uint32_t step = gridDim.x * kAddThreads;
  for (uint32_t first = blockIdx.x * kAddThreads + threadIdx.x; first < elements; first += kAhead * step) {
    Value values[kAhead][kSegments];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) LoadParts(parts, min(first + i * step, elements - 1), values[i]);
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t element = first + i * step;
      if (element >= elements) continue;
      const uint32_t row = element / columns;
      const int64_t to = static_cast<int64_t>(tile.batch_rows[row]) * columns + (element - row * columns);
      AddInTree(values[i], parts.sums);
      Store(out, to, values[i][0]);
    }
  }
}

// A part is `elements` Values. Each thread has read what it writes over.
template <class Value>
__global__ void __launch_bounds__(kAddThreads)
    AddPartsKernel(const InputGradientParts parts, SegmentBits unsummed, uint32_t elements, float* out) {
  const uint32_t step = gridDim.x * kAddThreads;
  for (uint32_t element = blockIdx.x * kAddThreads + threadIdx.x; element < elements; element += step) {
    Value values[kFixedSegments];
    LoadParts(parts, element, values);
    AddInTree(values, parts.sums);
    int64_t to = element;
#pragma unroll
    for (int s = 0; s < kFixedSegments; ++s) {
      if (!Has(unsummed, s)) continue;
      Store(out, to, values[s]);
      to += elements;
    }
  }
}

template <int kSegments, class T>
Result LaunchAddInputGradients(const TileRows& tile, const InputGradientParts& parts, T* out,
                               cudaStream_t stream) {
  const auto hidden = static_cast<uint32_t>(tile.hidden);
  const bool in_fours = hidden % 4 == 0 && reinterpret_cast<uintptr_t>(out) % (4 * sizeof(T)) == 0;
  void (*kernel)(TileRows, InputGradientParts, uint32_t, T*) =
      in_fours ? &AddInputGradientsKernel<kSegments, T, float4>
               : &AddInputGradientsKernel<kSegments, T, float>;
  const uint32_t columns = in_fours ? hidden / 4 : hidden;
  const unsigned blocks = std::min(Blocks(int64_t{tile.rows} * columns, kAddThreads), kMostAddBlocks);
  kernel<<<blocks, kAddThreads, 0, stream>>>(tile, parts, columns, out);
  return {cudaGetLastError(), "AddInputGradients"};
}

}  // namespace

Result PlaceLabels(const int32_t* labels, int32_t rows, int64_t first_entry, int64_t vocab,
                   const PlacedLabels& out, cudaStream_t stream) {
  PlaceLabelsKernel<<<Blocks(rows, kThreads), kThreads, 0, stream>>>(labels, rows, first_entry, vocab, out);
  return {cudaGetLastError(), "PlaceLabels"};
}

Result SplitRows(const TileRows& tile, const OwnSegments& segments, const PlacedLabels& labels,
                 cudaStream_t stream) {
  SplitRowsKernel<<<Blocks(tile.rows, kThreads), kThreads, 0, stream>>>(tile, segments, labels);
  return {cudaGetLastError(), "SplitRows"};
}

Result MergeRows(const TileRows& tile, const ShardStatistics* statistics, const MergedSegments& segments,
                 cudaStream_t stream) {
  MergeRowsKernel<<<Blocks(tile.rows, kMergeThreads), kMergeThreads, 0, stream>>>(tile, statistics, segments);
  return {cudaGetLastError(), "MergeRows"};
}

Result AddParts(const TileRows& tile, const InputGradientParts& parts, SegmentBits unsummed, float* out,
                cudaStream_t stream) {
  const bool in_fours = tile.hidden % 4 == 0;
  const auto elements = static_cast<uint32_t>(tile.rows * tile.hidden / (in_fours ? 4 : 1));
  const unsigned blocks = std::min(Blocks(elements, kAddThreads), kMostAddBlocks);
  const auto kernel = in_fours ? &AddPartsKernel<float4> : &AddPartsKernel<float>;
  kernel<<<blocks, kAddThreads, 0, stream>>>(parts, unsummed, elements, out);
  return {cudaGetLastError(), "AddParts"};
}

Result AddInputGradients(const TileRows& tile, const InputGradientParts& parts, DataType out_type, void* out,
                         cudaStream_t stream) {
  Result result;
  WithType(out_type, [&](auto type) {
    auto* to = static_cast<decltype(type)*>(out);
    result = parts.segments == 2 ? LaunchAddInputGradients<2>(tile, parts, to, stream)
                                 : LaunchAddInputGradients<kFixedSegments>(tile, parts, to, stream);
  });
  return result;
}

Result LoadShardKernels() {
  KernelLoader loader;
  loader.Add(&PlaceLabelsKernel);
  loader.Add(&SplitRowsKernel);
  loader.Add(&MergeRowsKernel);
  loader.Add(&AddPartsKernel<float>);
  loader.Add(&AddPartsKernel<float4>);
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    WithType(type, [&](auto out) {
      using T = decltype(out);
      loader.Add(&AddInputGradientsKernel<2, T, float>);
      loader.Add(&AddInputGradientsKernel<2, T, float4>);
      loader.Add(&AddInputGradientsKernel<kFixedSegments, T, float>);
      loader.Add(&AddInputGradientsKernel<kFixedSegments, T, float4>);
    });
  }
  return loader.result();
}

}  // namespace lossd::kernels::cuda
