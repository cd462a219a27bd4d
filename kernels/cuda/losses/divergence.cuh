// One entry's part of a divergence and of its gradient. Each part is written so that it is never negative and
// keeps its digits where the two distributions are nearly the same: docs/numerics.md, "Soft targets".
#ifndef LOSSD_KERNELS_CUDA_LOSSES_DIVERGENCE_CUH_
#define LOSSD_KERNELS_CUDA_LOSSES_DIVERGENCE_CUH_

#include <cuda_runtime.h>

#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels::cuda {

// Below this |log p - log q| differences of exponentials are made by a series.
inline constexpr float kNearBelow = 0.5f;

// Rounded as written: kernels for losses alone and those for gradients too must come to the same bits,
// whatever products a compiler would fuse with the sums behind them in either.
__device__ inline float Times(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double Times(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float TimesPlus(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double TimesPlus(double a, double b, double c) { return __fma_rn(a, b, c); }

// e^-d - 1 + d, which is not negative, for |d| < kNearBelow: within 2^-23 of itself.
__device__ inline float Excess(float d) {
  float sum = 1.0f / 40320;
  sum = __fmaf_rn(sum, -d, 1.0f / 5040);
  sum = __fmaf_rn(sum, -d, 1.0f / 720);
  sum = __fmaf_rn(sum, -d, 1.0f / 120);
  sum = __fmaf_rn(sum, -d, 1.0f / 24);
  sum = __fmaf_rn(sum, -d, 1.0f / 6);
  sum = __fmaf_rn(sum, -d, 0.5f);
  return Times(Times(d, d), sum);
}
__device__ inline double Excess(double d) { return expm1(-d) + d; }

__device__ inline bool IsNear(float d) { return fabsf(d) < kNearBelow; }
__device__ inline bool IsNear(double d) { return fabs(d) < static_cast<double>(kNearBelow); }
__device__ inline float Absolute(float x) { return fabsf(x); }
__device__ inline double Absolute(double x) { return fabs(x); }
__device__ inline float Exponential(float x) { return expf(x); }
__device__ inline double Exponential(double x) { return exp(x); }
__device__ inline float Logarithm(float x) { return logf(x); }
__device__ inline double Logarithm(double x) { return log(x); }
__device__ inline float LogarithmNearOne(float x) { return log1pf(x); }
__device__ inline double LogarithmNearOne(double x) { return log1p(x); }

// p and q of one entry. Real is float in rows, and double for the label's own entry.
template <class Real>
struct EntryPair {
  Real p;
  Real q;
  Real d;  // log p - log q; infinite or NaN only where a logit of theirs is -infinity
};

// a log(a / b) - a + b where l = log(a / b), which may be anything where a is 0.
template <class Real>
__device__ Real RelativeEntropyPart(Real a, Real b, Real l) {
  if (!(a > 0)) return b - a;
  return IsNear(l) ? Times(a, Excess(l)) : TimesPlus(a, l, b - a);
}

// q - p.
template <class Real>
__device__ Real Difference(const EntryPair<Real>& e) {
  return IsNear(e.d) ? Times(e.p, Excess(e.d) - e.d) : e.q - e.p;
}

// m = β p + (1 - β) q, and where p and q are to it.
template <class Real>
struct Mixture {
  Real m;
  Real log_p;  // log(p / m)
  Real log_q;  // log(q / m)
};

template <class Real>
__device__ Mixture<Real> MixtureOf(const EntryPair<Real>& e, Real beta) {
  const Real rest = 1 - beta;
  const Real distance = Absolute(e.d);
  const bool p_larger = e.d >= 0;
  const Real larger = p_larger ? beta : rest;  // the larger one's share, and the other's
  const Real smaller = p_larger ? rest : beta;
  Real of_larger = 0;
  if (IsNear(e.d)) {
    of_larger = -LogarithmNearOne(Times(smaller, Excess(distance) - distance));
  } else {
    of_larger = -Logarithm(TimesPlus(smaller, Exponential(-distance), larger));
  }
  const Real of_smaller = of_larger - distance;
  return {TimesPlus(beta, e.p, Times(rest, e.q)), p_larger ? of_larger : of_smaller,
          p_larger ? of_smaller : of_larger};
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_DIVERGENCE_CUH_
