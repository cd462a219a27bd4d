// What becomes of a product's sum, with the bias added, before it is a logit: s = c tanh(τ d / c), or τ d
// without softcap. The same in three precisions: each place uses the cheapest that does not show in its
// results.
#ifndef LOSSD_KERNELS_CUDA_ROWS_LOGIT_TRANSFORM_CUH_
#define LOSSD_KERNELS_CUDA_ROWS_LOGIT_TRANSFORM_CUH_

#include <cuda_runtime.h>

#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cuda {

// s and ds / d(τ d) = 1 - (s / c)².
template <class Real>
struct CappedLogit {
  Real value;
  Real slope;
};

// For epilogues, whose products have operands of 16 bits: s within a few 2^-22 of itself, by the device's own
// ex2 and rcp. With w = 1 / (e^(2|z|/c) + 1), s = c - 2 c w and the slope is 4 w (1 - w), neither of which
// loses digits where the logit is at the cap; s would where it is far below, and is a series there.
struct FastLogitCap {
  float cap;
  float rate;  // |z| times this is the exponent of two

  __host__ __device__ explicit FastLogitCap(float softcap)
      : cap(softcap), rate(softcap > 1e-37f ? 2.88539008f / softcap : 1e38f) {}

  __device__ CappedLogit<float> operator()(float z) const {
    constexpr float kSeriesBelow = 0.72134752f;     // |z| / c = 1/4
    constexpr double kSquare = 0.1201132534795503;  // (ln 2 / 2)²: of the exponent's square, (z / c)²
    constexpr auto k1 = static_cast<float>(-kSquare / 3);
    constexpr auto k2 = static_cast<float>(kSquare * kSquare * 2 / 15);
    constexpr auto k3 = static_cast<float>(-kSquare * kSquare * kSquare * 17 / 315);
    constexpr auto k4 = static_cast<float>(kSquare * kSquare * kSquare * kSquare * 62 / 2835);
    const float exponent = fminf(fabsf(z) * rate, 126.0f);
    float power = 0;
    float w = 0;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(power + 1.0f));
    const float square = exponent * exponent;
    const float series = __fmaf_rn(square, __fmaf_rn(square, __fmaf_rn(square, k4, k3), k2), k1);
    const float small = __fmaf_rn(fabsf(z) * square, series, fabsf(z));
    const float large = __fmaf_rn(-2.0f * cap, w, cap);
    return {copysignf(exponent < kSeriesBelow ? small : large, z), __fmaf_rn(-4.0f * w, w, 4.0f * w)};
  }
};

// This form is as exact as the type.
__device__ inline CappedLogit<float> CapLogit(float z, float cap) {
  const float u = z / cap;
  const float w = 1.0f / (expf(2.0f * fabsf(u)) + 1.0f);
  return {cap * tanhf(u), 4.0f * w * (1.0f - w)};
}
__device__ inline CappedLogit<double> CapLogit(double z, double cap) {
  const double u = z / cap;
  const double w = 1.0 / (exp(2.0 * fabs(u)) + 1.0);
  return {cap * tanh(u), 4.0 * w * (1.0 - w)};
}

// `sum` is a product's, or its label's exact value.
template <class Real>
__device__ CappedLogit<Real> TransformLogit(Real sum, const LossOptions& options) {
  const Real z = sum * static_cast<Real>(options.logit_scale);
  if (options.softcap == 0) return {z, 1};
  return CapLogit(z, static_cast<Real>(options.softcap));
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROWS_LOGIT_TRANSFORM_CUH_
