// Epilogues of logits products that few kinds of rows need: label smoothing with softcap, and the sums
// themselves.
#ifndef LOSSD_KERNELS_CUDA_SM90_SMOOTHED_EPILOGUES_CUH_
#define LOSSD_KERNELS_CUDA_SM90_SMOOTHED_EPILOGUES_CUH_

#include "kernels/cuda/sm90/epilogues.cuh"

namespace lossd::kernels::cuda::sm90 {

// The passes of label smoothing with softcap: first what the losses need, then, when each row's factors are
// known, the entries of the logits' gradient.
enum class SmoothedPass { kSums, kGradient };

template <class T, SmoothedPass kPass>
struct SmoothedEpilogue {
  // kGradient: (A E - B C) f rounded once to T [rows, stride], zero for the row's label and in columns from
  // the vocabulary's end to stride.
  T* gradients;
  int64_t stride;           // a multiple of 8
  const float* factors;     // A [rows]
  const float* smoothings;  // B [rows]
  // kSums: of E and of C s without the row's label, [columns of tiles, sums_stride].
  float* sums;
  float* logit_sums;
  int64_t sums_stride;
  const float* class_weights;  // C [columns]; null: 1
  const float* bias;           // [columns]; null: none
  const float* offsets;        // [rows]
  const int32_t* exponents;    // [rows], even
  const int32_t* labels;       // [rows]
  const int32_t* row_map;      // null, or where row r of the product is among the rows of everything above
  float logit_scale;
  FastLogitCap cap;

  template <class Tile>
  __device__ void Store(typename Tile::Accumulators& d, int32_t first_row, int32_t first_column, int32_t rows,
                        int32_t columns, uint32_t thread) const {
    if (bias != nullptr) AddBias<Tile>(bias, 1, first_column, columns, thread, d);
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row + 64 * band + RowOfThread(thread) + 8 * half;
        const bool valid = row < rows;
        const int32_t place = !valid ? 0 : row_map == nullptr ? row : row_map[row];
        StoreRow<Tile>(d[band], half, place, valid, first_column, columns, thread);
      }
    }
  }

 private:
  template <class Tile>
  __device__ void StoreRow(float (&d)[Tile::kBlockN / 2], int half, int32_t place, bool valid,
                           int32_t first_column, int32_t columns, uint32_t thread) const {
    const auto lane = static_cast<int32_t>(thread % 4);
    const int32_t label = labels[place];
    const ScaledExponential exponential(offsets[place], exponents[place]);
    const float factor = kPass == SmoothedPass::kGradient ? factors[place] : 0.0f;
    const float smoothing = kPass == SmoothedPass::kGradient ? smoothings[place] : 0.0f;
    float sums_of_four[4] = {};
    float logits_of_four[4] = {};
#pragma unroll
    for (int block = 0; block < Tile::kBlockN / 32; ++block) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t column = first_column + 32 * block + 8 * j + 2 * lane + i;
          const bool counts = column != label && column < columns;
          const CappedLogit<float> s = cap(__fmul_rn(d[4 * (4 * block + j) + 2 * half + i], logit_scale));
          const float e = counts ? exponential(s.value) : 0.0f;
          float weight = counts ? 1.0f : 0.0f;
          if (counts && class_weights != nullptr) weight = class_weights[column];
          if constexpr (kPass == SmoothedPass::kSums) {
            sums_of_four[j] += e;
            logits_of_four[j] = __fmaf_rn(weight, s.value, logits_of_four[j]);
          } else {
            values[i] = __fmaf_rn(factor, e, -smoothing * weight) * s.slope;
          }
        }
        if constexpr (kPass == SmoothedPass::kGradient) words[j] = PackPair<T>(values[0], values[1]);
      }
      if constexpr (kPass == SmoothedPass::kGradient) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint2 packed = ExchangePair(words[j], words[j + 1]);
          const int32_t column = first_column + 32 * block + 8 * j + (lane & 1) * 8 + (lane >> 1) * 4;
          if (valid && column < stride) {
            *reinterpret_cast<uint2*>(gradients + place * stride + column) = packed;
          }
        }
      }
    }
    if constexpr (kPass == SmoothedPass::kSums) {
      const float sum = SumOfQuad((sums_of_four[0] + sums_of_four[1]) + (sums_of_four[2] + sums_of_four[3]));
      const float logit_sum =
          SumOfQuad((logits_of_four[0] + logits_of_four[1]) + (logits_of_four[2] + logits_of_four[3]));
      if (valid && lane == 0) {
        const int64_t piece = first_column / Tile::kBlockN * sums_stride + place;
        sums[piece] = sum;
        logit_sums[piece] = logit_sum;
      }
    }
  }
};

// The sums as they are.
struct PlainEpilogue {
  float* out;      // [rows, stride]
  int64_t stride;  // a multiple of 8

  template <class Tile>
  __device__ void Store(typename Tile::Accumulators& d, int32_t first_row, int32_t first_column, int32_t rows,
                        int32_t /*columns*/, uint32_t thread) const {
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row + 64 * band + RowOfThread(thread) + 8 * half;
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < Tile::kBlockN / 8; ++j) {
          const int32_t column = first_column + 8 * j + 2 * static_cast<int32_t>(thread % 4);
          if (column >= stride) continue;
          *reinterpret_cast<float2*>(out + row * stride + column) =
              make_float2(d[band][4 * j + 2 * half], d[band][4 * j + 2 * half + 1]);
        }
      }
    }
  }
};

}  // namespace lossd::kernels::cuda::sm90

#endif  // LOSSD_KERNELS_CUDA_SM90_SMOOTHED_EPILOGUES_CUH_
