// Epilogues of logits products that few kinds of rows need: gradients whose entries have each a part of their
// own, and the sums themselves.
#ifndef LOSSD_KERNELS_CUDA_SM90_ENTRY_EPILOGUES_CUH_
#define LOSSD_KERNELS_CUDA_SM90_ENTRY_EPILOGUES_CUH_

#include "kernels/cuda/sm90/epilogues.cuh"

namespace lossd::kernels::cuda::sm90 {

// The passes of rows of Smoothing::kElementwise: first what losses and factors need, then, when each row's
// factors are known, the entries of the logits' gradient.
enum class EntryPass { kSums, kGradient };

template <class T, EntryPass kPass>
struct EntryEpilogue {
  // kGradient: ((A - D (s - offset - M)) E - B C) f rounded once to T [rows, stride], zero for the row's
  // label and in columns from the vocabulary's end to stride.
  T* gradients;
  int64_t stride;           // a multiple of 8
  const float* factors;     // A [rows]
  const float* smoothings;  // B [rows]
  const float* spreads;     // D [rows]
  const float* means;       // M [rows]
  // kSums: of E, of C s and of E (s - offset), without the row's label, [columns of tiles, sums_stride].
  float* sums;
  float* logit_sums;
  float* moments;
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
    const float offset = offsets[place];
    const ScaledExponential exponential(offset, exponents[place]);
    const float factor = kPass == EntryPass::kGradient ? factors[place] : 0.0f;
    const float smoothing = kPass == EntryPass::kGradient ? smoothings[place] : 0.0f;
    const float spread = kPass == EntryPass::kGradient ? spreads[place] : 0.0f;
    const float mean = kPass == EntryPass::kGradient ? means[place] : 0.0f;
    // A row that has overflowed has none, whatever its logits are.
    const bool spreads = kPass == EntryPass::kSums || spread != 0.0f;
    float sums_of_four[4] = {};
    float logits_of_four[4] = {};
    float moments_of_four[4] = {};
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
          const CappedLogit<float> s = LogitOf(d[4 * (4 * block + j) + 2 * half + i]);
          const float e = counts ? exponential(s.value) : 0.0f;
          // Where a logit is far below the others, as that of an entry that a bias rules out, E was clamped:
          // it is little by itself, but times the logit it may be anything.
          const bool has_moment = spreads && !exponential.IsBelow(s.value);
          float weight = counts ? 1.0f : 0.0f;
          if (counts && class_weights != nullptr) weight = class_weights[column];
          if constexpr (kPass == EntryPass::kSums) {
            values[i] = e;
            if (weight != 0.0f) logits_of_four[j] = __fmaf_rn(weight, s.value, logits_of_four[j]);
            if (has_moment) moments_of_four[j] = __fmaf_rn(e, s.value - offset, moments_of_four[j]);
          } else {
            const float own = has_moment ? __fmaf_rn(-spread, s.value - offset - mean, factor) : factor;
            values[i] = __fmaf_rn(own, e, -smoothing * weight) * s.slope;
          }
        }
        // As ExponentialsEpilogue adds them.
        if constexpr (kPass == EntryPass::kSums) sums_of_four[j] += values[0] + values[1];
        if constexpr (kPass == EntryPass::kGradient) words[j] = PackPair<T>(values[0], values[1]);
      }
      if constexpr (kPass == EntryPass::kGradient) {
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
    if constexpr (kPass == EntryPass::kSums) {
      const float sum = SumOfQuad((sums_of_four[0] + sums_of_four[1]) + (sums_of_four[2] + sums_of_four[3]));
      const float logit_sum =
          SumOfQuad((logits_of_four[0] + logits_of_four[1]) + (logits_of_four[2] + logits_of_four[3]));
      const float moment =
          SumOfQuad((moments_of_four[0] + moments_of_four[1]) + (moments_of_four[2] + moments_of_four[3]));
      if (valid && lane == 0) {
        const int64_t piece = first_column / Tile::kBlockN * sums_stride + place;
        sums[piece] = sum;
        logit_sums[piece] = logit_sum;
        moments[piece] = moment;
      }
    }
  }

  __device__ CappedLogit<float> LogitOf(float sum) const {
    const float z = __fmul_rn(sum, logit_scale);
    return cap.cap == 0 ? CappedLogit<float>{z, 1.0f} : cap(z);
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

#endif  // LOSSD_KERNELS_CUDA_SM90_ENTRY_EPILOGUES_CUH_
