// One entry's part of a divergence and of its gradient. Each part is written so that it is never negative and
// keeps its digits where the two distributions are nearly the same: docs/numerics.md, "Soft targets".
#ifndef LOSSD_KERNELS_CPU_DIVERGENCE_H_
#define LOSSD_KERNELS_CPU_DIVERGENCE_H_

#include <cmath>

namespace lossd::kernels::cpu {

// Below this |log p − log q| differences of exponentials are made by a series.
template <class Real>
inline bool IsNear(Real d) {
  return std::fabs(d) < Real(0.5);
}

// e^−d − 1 + d, which is not negative. Float: only where IsNear.
inline float Excess(float d) {
  float sum = 1.0f / 40320;
  for (const float coefficient : {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f}) {
    sum = coefficient - d * sum;
  }
  return d * d * sum;
}
inline double Excess(double d) { return std::expm1(-d) + d; }

// p and q of one entry. Real is float in rows, and double for the label's own entry.
template <class Real>
struct EntryPair {
  Real p;
  Real q;
  Real d;  // log p − log q; ±∞ or NaN only where a logit of theirs is -∞
};

// a log(a / b) − a + b where l = log(a / b), which may be anything where a is 0.
template <class Real>
Real RelativeEntropyPart(Real a, Real b, Real l) {
  if (!(a > 0)) return b - a;
  return IsNear(l) ? a * Excess(l) : a * l + (b - a);
}

// q − p.
template <class Real>
Real Difference(const EntryPair<Real>& e) {
  return IsNear(e.d) ? e.p * (Excess(e.d) - e.d) : e.q - e.p;
}

// m = β p + (1 − β) q, and where p and q are to it.
template <class Real>
struct Mixture {
  Real m;
  Real log_p;  // log(p / m)
  Real log_q;  // log(q / m)
};

template <class Real>
Mixture<Real> MixtureOf(const EntryPair<Real>& e, Real beta) {
  const Real rest = 1 - beta;
  const Real distance = std::fabs(e.d);
  const bool p_larger = e.d >= 0;
  const Real larger = p_larger ? beta : rest;  // the larger one's share, and the other's
  const Real smaller = p_larger ? rest : beta;
  const Real of_larger = IsNear(e.d) ? -std::log1p(smaller * (Excess(distance) - distance))
                                     : -std::log(larger + smaller * std::exp(-distance));
  const Real of_smaller = of_larger - distance;
  return {beta * e.p + rest * e.q, p_larger ? of_larger : of_smaller, p_larger ? of_smaller : of_larger};
}

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_DIVERGENCE_H_
