#include "kernels/cuda/portable/softmax_rows.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// The values that replace a row's logits.
enum class RowForm {
  kPlain,    // E
  kOptions,  // E f, of logits that were shifted, scaled and capped
  kEntries,  // the gradient of the logits, where smoothing or the entropy has a part in each of them
};

template <RowForm kForm>
__device__ float SumOf(const TileRows& tile, const float* sums, int64_t entry) {
  if (kForm == RowForm::kPlain || tile.bias == nullptr) return sums[entry];
  return __fadd_rn(sums[entry], tile.bias[entry]);
}

// No product is to be fused with what becomes of it, which is not the same in every form: a row's loss has
// the same bits in all of them.
template <RowForm kForm>
__device__ CappedLogit<float> LogitOf(const TileRows& tile, float sum) {
  if constexpr (kForm == RowForm::kPlain) return {sum, 1.0f};
  const float z = __fmul_rn(sum, tile.options.logit_scale);
  if (tile.options.softcap == 0) return {z, 1.0f};
  CappedLogit<float> s = CapLogit(z, tile.options.softcap);
  s.value = __fadd_rn(s.value, 0.0f);
  return s;
}

template <RowForm kForm, class T>
__global__ void SoftmaxRowsKernel(const TileRows tile, float* logits, int64_t stride) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  float* z = logits + row * stride;
  T* e = reinterpret_cast<T*>(z);
  const int32_t label = tile.labels[row];
  float largest = SumOf<kForm>(tile, z, 0);
  for (int64_t v = threadIdx.x; v < tile.vocab; v += kThreads) {
    largest = fmaxf(largest, SumOf<kForm>(tile, z, v));
  }
  largest = fmaxf(tile.target_logits[row], LogitOf<kForm>(tile, MaximumOfBlock(largest)).value);
  largest = fmaxf(largest, -kLargestFloat);  // where a bias rules all of them out
  const ScaledExponential exponential(largest, 0);
  double others = 0;
  double smoothing_sum = 0;
  double moment = 0;
  for (int64_t first = 0; first < stride; first += kThreads) {
    const int64_t v = first + threadIdx.x;
    const bool counts = v < tile.vocab && v != label;
    const CappedLogit<float> s = LogitOf<kForm>(tile, counts ? SumOf<kForm>(tile, z, v) : 0.0f);
    const float value = counts ? exponential(s.value) : 0.0f;
    if constexpr (kForm == RowForm::kEntries) {
      if (counts) {
        smoothing_sum += WeightedLogit(ClassWeight(tile, v), s.value);
        if (!exponential.IsBelow(s.value)) moment += static_cast<double>(value) * (s.value - largest);
      }
    } else {
      __syncthreads();  // E of these columns lies where logits before them did: all of them have been read
      if (v < stride) e[v] = static_cast<T>(kForm == RowForm::kPlain ? value : value * s.slope);
    }
    others += value;
  }
  others = SumOfBlock(others);
  if constexpr (kForm == RowForm::kEntries) {
    smoothing_sum = SumOfBlock(smoothing_sum);
    moment = SumOfBlock(moment);
  }
  __shared__ float factors[4];
  if (threadIdx.x == 0) {
    tile.offsets[row] = largest;
    tile.exponents[row] = 0;
    const float target = tile.target_logits[row];
    RowSums sums{others, OwnExponential(exponential, target), 0, moment};
    if (tile.options.label_smoothing != 0) {
      sums.smoothing_sum = tile.options.softcap == 0
                               ? tile.options.logit_scale * tile.smoothing_logits[row]
                               : smoothing_sum + WeightedLogit(ClassWeight(tile, label), target);
    }
    const RowOutcome out = FinishRow(tile, row, sums);
    WriteRow(tile, row, out);
    factors[0] = out.gradient_factor;
    factors[1] = out.smoothing_factor;
    factors[2] = out.entropy_factor;
    factors[3] = out.mean;
  }
  if constexpr (kForm == RowForm::kEntries) {
    __syncthreads();
    for (int64_t first = 0; first < stride; first += kThreads) {
      const int64_t v = first + threadIdx.x;
      float value = 0;
      if (v < tile.vocab && v != label) {
        const CappedLogit<float> s = LogitOf<kForm>(tile, SumOf<kForm>(tile, z, v));
        // As in sm90/entry_epilogues.cuh.
        const bool spreads = factors[2] != 0.0f && !exponential.IsBelow(s.value);
        const float own =
            spreads ? __fmaf_rn(-factors[2], s.value - largest - factors[3], factors[0]) : factors[0];
        value = __fmaf_rn(own, exponential(s.value), -factors[1] * ClassWeight(tile, v)) * s.slope;
      }
      __syncthreads();
      if (v < stride) e[v] = static_cast<T>(value);
    }
  }
}

template <class T, class TOut>
__global__ void FinishInputGradientKernel(const TileRows tile, const float* product, TOut* out) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  const T* own = static_cast<const T*>(tile.weight) + tile.labels[row] * tile.padded_hidden;
  const bool smoothed = tile.smoothing == Smoothing::kRankOne;
  for (int64_t h = threadIdx.x; h < tile.hidden; h += kThreads) {
    float x = __fmaf_rn(tile.target_gradients[row], Widen(own[h]),
                        tile.scales[row] * product[row * tile.padded_hidden + h]);
    if (smoothed) x = __fmaf_rn(-tile.smoothing_factors[row], tile.classes.vocabulary_sum[h], x);
    out[tile.batch_rows[row] * tile.hidden + h] = static_cast<TOut>(x);
  }
}

RowForm FormOf(const TileRows& tile) {
  if (tile.smoothing == Smoothing::kElementwise) return RowForm::kEntries;
  const bool plain = tile.options.logit_scale == 1.0f && tile.options.softcap == 0 && tile.bias == nullptr;
  return plain ? RowForm::kPlain : RowForm::kOptions;
}

}  // namespace

Result SoftmaxRows(const TileRows& tile, float* logits, int64_t stride, cudaStream_t stream) {
  WithType(tile.type, [&](auto type) {
    using T = decltype(type);
    const unsigned blocks = Blocks(tile.rows, 1);
    switch (FormOf(tile)) {
      case RowForm::kPlain:
        SoftmaxRowsKernel<RowForm::kPlain, T><<<blocks, kThreads, 0, stream>>>(tile, logits, stride);
        break;
      case RowForm::kOptions:
        SoftmaxRowsKernel<RowForm::kOptions, T><<<blocks, kThreads, 0, stream>>>(tile, logits, stride);
        break;
      case RowForm::kEntries:
        SoftmaxRowsKernel<RowForm::kEntries, T><<<blocks, kThreads, 0, stream>>>(tile, logits, stride);
        break;
    }
  });
  return {cudaGetLastError(), "SoftmaxRows"};
}

Result FinishInputGradient(const TileRows& tile, const float* product, DataType out_type, void* out,
                           cudaStream_t stream) {
  WithType(tile.type, [&](auto type) {
    WithType(out_type, [&](auto to) {
      FinishInputGradientKernel<decltype(type)>
          <<<Blocks(tile.rows, 1), kThreads, 0, stream>>>(tile, product, static_cast<decltype(to)*>(out));
    });
  });
  return {cudaGetLastError(), "FinishInputGradient"};
}

Result LoadPortableKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&](auto type) {
    using T = decltype(type);
    for (const DataType out_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      WithType(out_type, [&](auto out) { loader.Add(&FinishInputGradientKernel<T, decltype(out)>); });
    }
    loader.Add(&SoftmaxRowsKernel<RowForm::kPlain, T>);
    loader.Add(&SoftmaxRowsKernel<RowForm::kOptions, T>);
    loader.Add(&SoftmaxRowsKernel<RowForm::kEntries, T>);
  });
  return loader.result();
}

}  // namespace lossd::kernels::cuda
