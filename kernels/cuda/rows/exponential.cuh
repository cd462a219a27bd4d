// The one exponential of every CUDA path. See "The exponent" in docs/numerics.md.
#ifndef LOSSD_KERNELS_CUDA_ROWS_EXPONENTIAL_CUH_
#define LOSSD_KERNELS_CUDA_ROWS_EXPONENTIAL_CUH_

#include <cstdint>

namespace lossd::kernels::cuda {

// e^(z - offset) 2^-k with an even integer k that never touches a mantissa: e^z is split into 2^n 2^f,
// |f| <= 1/2, and n - k goes straight into the exponent. (k is even so that ties round alike.) Clamped to
// 2^±126. z is finite: PrepareRows sees to that.
struct ScaledExponential {
  static constexpr float kMagic = 12582912.0f;  // 1.5 2^23: adding it rounds to an integer in the low bits

  float offset;
  float low, high;  // bounds of z - offset
  float shift;      // kMagic - k

  __device__ ScaledExponential(float row_offset, int32_t k)
      : offset(row_offset),
        low(static_cast<float>(k - 125) * 0.693147181f),
        high(static_cast<float>(k + 126) * 0.693147181f),
        shift(kMagic - static_cast<float>(k)) {}

  // Whether z is so small that it was clamped: its exponential is then nothing to compute with.
  __device__ bool IsBelow(float z) const { return z - offset < low; }

  __device__ float operator()(float z) const { return WithoutOffset(z - offset); }

  // The same where the offset is 0.
  __device__ float WithoutOffset(float z) const { return OfClamped(Clamped(z)); }

  // z - offset, or the bound that it is beyond; and the exponential of that.
  __device__ float Clamped(float above_offset) const { return fminf(fmaxf(above_offset, low), high); }
  __device__ float OfClamped(float z) const {
    // Rounded to fp32: as if z were 1.3e-8 smaller, a fifth of its own last digit.
    constexpr float kLog2E = 1.44269502e+00f;
    const float rounded = __fmaf_rn(z, kLog2E, shift);
    const float f = __fmaf_rn(z, kLog2E, shift - rounded);
    float e = 0;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(f));
    return __int_as_float(__float_as_int(e) + (__float_as_int(rounded) << 23));
  }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_EXPONENTIAL_CUH_
