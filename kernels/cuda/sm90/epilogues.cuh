// What becomes of a product's sums while they are still in registers. See docs/numerics.md for the formulas.
//
// A thread of a consumer holds, for each band of 64 rows, the sums d[4 j + 2 half + i] of row
// 16 (thread / 32) + thread % 32 / 4 + 8 half and column 8 j + 2 (thread % 4) + i.
#ifndef LOSSD_KERNELS_CUDA_SM90_EPILOGUES_CUH_
#define LOSSD_KERNELS_CUDA_SM90_EPILOGUES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/rows/exponential.cuh"
#include "kernels/cuda/rows/logit_transform.cuh"
#include "kernels/data_type.h"

namespace lossd::kernels::cuda::sm90 {

__device__ inline int32_t RowOfThread(uint32_t thread) {
  return static_cast<int32_t>(thread / 32 * 16 + thread % 32 / 4);
}

template <class T>
__device__ inline uint32_t PackPair(float low, float high);
template <>
__device__ inline uint32_t PackPair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t PackPair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The four lanes of a row hold words of two neighbouring 16-byte blocks, word i of each in lane i. Afterwards
// a pair of lanes holds half a block each: lanes 0 and 2 the first, 1 and 3 the second.
__device__ inline uint2 ExchangePair(uint32_t first, uint32_t second) {
  const bool odd = (threadIdx.x & 1) != 0;
  const uint32_t near = __shfl_xor_sync(0xFFFFFFFF, odd ? first : second, 1);
  return odd ? make_uint2(near, second) : make_uint2(first, near);
}

__device__ inline float SumOfQuad(float value) {
  value += __shfl_xor_sync(0xFFFFFFFF, value, 1);
  return value + __shfl_xor_sync(0xFFFFFFFF, value, 2);
}
__device__ inline float MaximumOfQuad(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 2));
}

// Adds the bias of their columns to a product's sums: of column c, bias[c step]. By itself before all else,
// because beside the sums there are few registers left for what else becomes of them.
template <class Tile>
__device__ void AddBias(const float* bias, int64_t step, int32_t first_column, int32_t columns,
                        uint32_t thread, typename Tile::Accumulators& d) {
  const int32_t lane_column = first_column + 2 * static_cast<int32_t>(thread % 4);
#pragma unroll
  for (int j = 0; j < Tile::kBlockN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t column = lane_column + 8 * j + i;
      const float shift = column < columns ? bias[column * step] : 0.0f;
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band) {
        d[band][4 * j + i] = __fadd_rn(d[band][4 * j + i], shift);
        d[band][4 * j + 2 + i] = __fadd_rn(d[band][4 * j + 2 + i], shift);
      }
    }
  }
}

// What a product's sums are before they are logits: nothing is spent on what most heads have not. A bias may
// be added with kScale and kCap.
enum class Transform { kNone, kScale, kCap };

// E, rounded once to T, and the sums of its unrounded values over each tile's columns, without the row's
// label, whose E is stored as zero. With kCap what is stored is E f. With kMoments also the sums of
// E (z - offset), z being what E was clamped to: where that is far below the others, E is nothing.
template <class T, Transform kTransform, bool kMoments = false>
struct ExponentialsEpilogue {
  T* exponentials;  // [rows, stride], zero in columns from the vocabulary's end to stride; or null
  int64_t stride;   // a multiple of 8
  float* sums;      // [columns of tiles, sums_stride]
  float* moments;   // the same; of kMoments
  int64_t sums_stride;
  const float* offsets;      // [rows]
  const int32_t* exponents;  // [rows], even
  const int32_t* labels;     // [rows]
  const int32_t* row_map;    // null, or where row r of the product is among the rows of everything above
  const float* bias;         // [columns], or null: none; not of kNone
  float logit_scale;
  FastLogitCap cap;

  template <class Tile>
  __device__ void Store(typename Tile::Accumulators& d, int32_t first_row, int32_t first_column, int32_t rows,
                        int32_t columns, uint32_t thread) const {
    if constexpr (kTransform != Transform::kNone) {
      if (bias != nullptr) AddBias<Tile>(bias, 1, first_column, columns, thread, d);
    }
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row + 64 * band + RowOfThread(thread) + 8 * half;
        const bool valid = row < rows;
        const int32_t place = !valid ? 0 : row_map == nullptr ? row : row_map[row];
        const int32_t label = labels[place] - first_column;
        const bool special = (label >= 0 && label < Tile::kBlockN) ||
                             first_column + Tile::kBlockN > columns || offsets[place] != 0;
        const ScaledExponential exponential(offsets[place], exponents[place]);
        const PieceSums piece = __any_sync(0xFFFFFFFF, special)
                                    ? StoreRow<Tile, true>(d[band], half, place, valid, first_column, columns,
                                                           label, exponential, thread)
                                    : StoreRow<Tile, false>(d[band], half, place, valid, first_column,
                                                            columns, label, exponential, thread);
        const int64_t at = first_column / Tile::kBlockN * sums_stride + place;
        const float total = SumOfQuad(piece.sum);
        if (valid && thread % 4 == 0) sums[at] = total;
        if constexpr (kMoments) {
          const float moment = SumOfQuad(piece.moment);
          if (valid && thread % 4 == 0) moments[at] = moment;
        }
      }
    }
  }

 private:
  struct PieceSums {
    float sum;
    float moment;
  };

  template <class Tile, bool kSpecial>
  __device__ PieceSums StoreRow(float (&d)[Tile::kBlockN / 2], int half, int32_t place, bool valid,
                                int32_t first_column, int32_t columns, int32_t label,
                                const ScaledExponential& exponential, uint32_t thread) const {
    const auto lane = static_cast<int32_t>(thread % 4);
    float sums_of_four[4] = {};  // four chains of additions instead of one
    float moments_of_two[2] = {};
#pragma unroll
    for (int block = 0; block < Tile::kBlockN / 32; ++block) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float e[2];
        float slopes[2] = {1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float z = d[4 * (4 * block + j) + 2 * half + i];
          if constexpr (kTransform != Transform::kNone) z = __fmul_rn(z, logit_scale);
          if constexpr (kTransform == Transform::kCap) {
            const CappedLogit<float> capped = cap(z);
            z = capped.value;
            slopes[i] = capped.slope;
          }
          if constexpr (kSpecial) z -= exponential.offset;
          z = exponential.Clamped(z);
          e[i] = exponential.OfClamped(z);
          if constexpr (kSpecial) {
            const int32_t column = 32 * block + 8 * j + 2 * lane + i;
            if (column == label || first_column + column >= columns) e[i] = 0.0f;
          }
          if constexpr (kMoments) moments_of_two[i] = __fmaf_rn(e[i], z, moments_of_two[i]);
        }
        sums_of_four[j] += e[0] + e[1];
        if constexpr (kTransform == Transform::kCap) {
          e[0] *= slopes[0];
          e[1] *= slopes[1];
        }
        words[j] = PackPair<T>(e[0], e[1]);
      }
      if (exponentials == nullptr) continue;
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint2 packed = ExchangePair(words[j], words[j + 1]);
        const int32_t column = first_column + 32 * block + 8 * j + (lane & 1) * 8 + (lane >> 1) * 4;
        if (valid && column < stride) {
          *reinterpret_cast<uint2*>(exponentials + place * stride + column) = packed;
        }
      }
    }
    return {(sums_of_four[0] + sums_of_four[1]) + (sums_of_four[2] + sums_of_four[3]),
            moments_of_two[0] + moments_of_two[1]};
  }
};

// The largest sum of each row, with the bias, in each tile's columns.
struct MaximumEpilogue {
  float* maxima;  // [columns of tiles, stride]
  int64_t stride;
  const float* bias;  // or null; of column c at c bias_step
  int64_t bias_step;

  template <class Tile>
  __device__ void Store(typename Tile::Accumulators& d, int32_t first_row, int32_t first_column, int32_t rows,
                        int32_t columns, uint32_t thread) const {
    if (bias != nullptr) AddBias<Tile>(bias, bias_step, first_column, columns, thread, d);
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = -__int_as_float(0x7F800000);
#pragma unroll
        for (int j = 0; j < Tile::kBlockN / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int32_t column = first_column + 8 * j + 2 * static_cast<int32_t>(thread % 4) + i;
            const float z = d[band][4 * j + 2 * half + i];
            if (column < columns) largest = fmaxf(largest, z);
          }
        }
        largest = MaximumOfQuad(largest);
        const int32_t row = first_row + 64 * band + RowOfThread(thread) + 8 * half;
        if (row < rows && thread % 4 == 0) maxima[first_column / Tile::kBlockN * stride + row] = largest;
      }
    }
  }
};

// Four values as one access of memory.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T values[4];
};

// Turns sums at columns 2 q, 2 q + 1 of two neighbouring blocks of 8 columns, q being the lane of four, into
// those at four columns in a row: of the first block in even lanes, of the second in odd ones.
__device__ inline Four<float> FourInARow(const float* first, const float* second) {
  const bool odd = (threadIdx.x & 1) != 0;
  const float x = __shfl_xor_sync(0xFFFFFFFF, odd ? first[0] : second[0], 1);
  const float y = __shfl_xor_sync(0xFFFFFFFF, odd ? first[1] : second[1], 1);
  if (odd) return {x, y, second[0], second[1]};
  return {first[0], first[1], x, y};
}

// dX = v (E W) + c W_y, rounded once, written to the row's place in the batch. With kSmoothed also
// - τ γ Σ C_v W_v.
template <class T, bool kSmoothed>
struct InputGradientEpilogue {
  void* out;  // [rows of the batch, out_stride] of out_type
  DataType out_type;
  int64_t out_stride;
  bool out_in_fours;               // `out` and its rows are aligned to four elements
  const T* weight;                 // [V, weight_stride]
  int64_t weight_stride;           // a multiple of 4
  const float* scales;             // v [rows]
  const float* target_gradients;   // c [rows]
  const int32_t* labels;           // [rows]
  const int32_t* batch_rows;       // [rows], where the row belongs in the batch
  const float* smoothing_factors;  // τ γ [rows]
  const float* vocabulary_sum;     // Σ C_v W_v [weight_stride]

  template <class Tile>
  __device__ void Store(typename Tile::Accumulators& d, int32_t first_row, int32_t first_column, int32_t rows,
                        int32_t columns, uint32_t thread) const {
    switch (out_type) {
      case DataType::kFloat32:
        return StoreAs<Tile, float>(d, first_row, first_column, rows, columns, thread);
      case DataType::kBFloat16:
        return StoreAs<Tile, __nv_bfloat16>(d, first_row, first_column, rows, columns, thread);
      case DataType::kFloat16:
        return StoreAs<Tile, __half>(d, first_row, first_column, rows, columns, thread);
    }
  }

 private:
  template <class Tile, class TOut>
  __device__ void StoreAs(typename Tile::Accumulators& d, int32_t first_row, int32_t first_column,
                          int32_t rows, int32_t columns, uint32_t thread) const {
    const auto lane = static_cast<int32_t>(thread % 4);
    const int32_t lane_column = first_column + lane % 2 * 8 + lane / 2 * 4;
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row + 64 * band + RowOfThread(thread) + 8 * half;
        const int32_t place = min(row, rows - 1);  // all lanes exchange sums, those without a row too
        const float scale = scales[place];
        const float target = target_gradients[place];
        const float smoothing_factor = kSmoothed ? smoothing_factors[place] : 0.0f;
        const T* own = weight + labels[place] * weight_stride;
        TOut* to = static_cast<TOut*>(out) + batch_rows[place] * out_stride;
#pragma unroll
        for (int j = 0; j < Tile::kBlockN / 8; j += 2) {
          const Four<float> sums = FourInARow(&d[band][4 * j + 2 * half], &d[band][4 * (j + 1) + 2 * half]);
          const int32_t column = lane_column + 8 * j;
          if (row >= rows || column >= columns) continue;
          const auto w = *reinterpret_cast<const Four<T>*>(own + column);
          Four<float> smoothing{};
          if constexpr (kSmoothed) {
            smoothing = *reinterpret_cast<const Four<float>*>(vocabulary_sum + column);
          }
          Four<TOut> x;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float value = __fmaf_rn(target, static_cast<float>(w.values[i]), scale * sums.values[i]);
            if constexpr (kSmoothed) value = __fmaf_rn(-smoothing_factor, smoothing.values[i], value);
            x.values[i] = static_cast<TOut>(value);
          }
          if (out_in_fours) {
            *reinterpret_cast<Four<TOut>*>(to + column) = x;
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (column + i < columns) to[column + i] = x.values[i];
            }
          }
        }
      }
    }
  }
};

// A 4 by 4 block of values, transposed among the lanes whose numbers differ in bits 2 and 3: lane i of the
// four holds column i beforehand (value v in `column[v]`), row i afterwards.
__device__ inline float4 TransposeAmongFour(const float* column) {
  const bool low = (threadIdx.x & 4) != 0;
  const bool high = (threadIdx.x & 8) != 0;
  const float near = __shfl_xor_sync(0xFFFFFFFF, low ? column[0] : column[1], 4);
  const float far = __shfl_xor_sync(0xFFFFFFFF, low ? column[2] : column[3], 4);
  const float2 upper = low ? make_float2(near, column[1]) : make_float2(column[0], near);
  const float2 lower = low ? make_float2(far, column[3]) : make_float2(column[2], far);
  const float2 away = high ? upper : lower;
  const float x = __shfl_xor_sync(0xFFFFFFFF, away.x, 8);
  const float y = __shfl_xor_sync(0xFFFFFFFF, away.y, 8);
  return high ? make_float4(x, y, lower.x, lower.y) : make_float4(upper.x, upper.y, x, y);
}

// dW, fp32, added to or overwritten, from the product of its transpose: rows are hidden elements, columns the
// vocabulary, so that the tile's 192 columns divide the larger of the two.
template <bool kAdd>
struct WeightGradientEpilogue {
  float* gradient;      // [V, stride]
  int64_t stride;       // a multiple of 4
  const float* factor;  // of every sum; null: 1

  template <class Tile>
  __device__ void Store(typename Tile::Accumulators& d, int32_t first_row, int32_t first_column, int32_t rows,
                        int32_t columns, uint32_t thread) const {
    const float scale = factor == nullptr ? 1.0f : *factor;
    // Afterwards lane i of the four has four hidden elements of the block's column i % 2, of its upper rows
    // or, from i = 2, its lower ones.
    const auto lane = static_cast<int32_t>(thread % 32 / 4 % 4);
    const auto four_rows = static_cast<int32_t>(thread / 32 * 16 + thread % 32 / 16 * 4) + lane / 2 * 8;
    const int32_t column = first_column + static_cast<int32_t>(thread % 4) * 2 + lane % 2;
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      const int32_t row = first_row + 64 * band + four_rows;
      float* to = gradient + column * stride + row;
#pragma unroll
      for (int j = 0; j < Tile::kBlockN / 8; ++j) {
        float4 four = TransposeAmongFour(&d[band][4 * j]);
        four = make_float4(four.x * scale, four.y * scale, four.z * scale, four.w * scale);
        if (row >= rows || column + 8 * j >= columns) continue;
        if constexpr (kAdd) {
          // Added by the L2 cache, which nobody waits for; each element is added to once, so nothing depends
          // on an order.
          asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 8 * j * stride),
                       "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
                       : "memory");
        } else {
          __stcs(reinterpret_cast<float4*>(to + 8 * j * stride), four);
        }
      }
    }
  }
};

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_EPILOGUES_CUH_
