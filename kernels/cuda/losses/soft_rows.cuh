// What the sums of a row of both heads make of its entries and of its end.
#ifndef LOSSD_KERNELS_CUDA_LOSSES_SOFT_ROWS_CUH_
#define LOSSD_KERNELS_CUDA_LOSSES_SOFT_ROWS_CUH_

#include "kernels/cuda/losses/divergence.cuh"
#include "kernels/cuda/losses/soft_parts.h"
#include "kernels/cuda/losses/soft_sums.cuh"
#include "kernels/cuda/losses/soft_targets.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {

// Entries are at most 1 in magnitude, but for roundings: more than that is none.
inline constexpr float kLargestEntry = 8.0f;

// What the row's sums make of it

// For all threads of the row.
struct EntryFactors {
  bool overflowed;
  float largest;
  float teacher_largest;
  float inverse;           // 1 / T
  float student;           // q = e^((s - largest) / T) times this
  float teacher;           // p likewise
  float shift;             // log p - log q = (t - s) / T - shift
  float mean;              // of kReverseKl: Σ q (s - t) / T; of kJensenShannon: KL(q ‖ m)
  float gradient_factor;   // of e^(s - largest)
  float smoothing_factor;  // of C
  float soft_factor;       // of ∂D/∂s T
  // e^(s - largest) is multiplied by the first times (logit_mean - (s - largest)) as well.
  float entropy_factor;
  float logit_mean;
};

// The label's own entry and what is for the row's end, in fp64. For thread 0.
struct RowEnd {
  double log_sum_exp;
  double surprise;  // -log p_y
  double log_sum;   // ℓ - largest
  EntryPair<double> own;
  double shift;
  double mean;
  double target;       // the label's entry of the gradient but for the divergence's part
  double soft_factor;  // of its ∂D/∂s T
  double slope;        // f
  float scale;
};

// The most that ∂D/∂s T can be in one entry.
template <Divergence kDivergence>
__device__ double Reach(const RowStatistics& sums, double student_sum, double teacher_sum, double inverse,
                        double beta) {
  const double spread = static_cast<double>(sums.spread()) * inverse;
  const double p_or_q = fmax(1.0 / student_sum, 1.0 / teacher_sum);
  if constexpr (kDivergence == Divergence::kForwardKl) return p_or_q * fmin(1.0, spread);
  if constexpr (kDivergence == Divergence::kReverseKl) return spread / student_sum;
  const double rest = 1.0 - beta;
  return rest * p_or_q * fmin(0.4 - 2.0 * log(rest), 2.0 * spread);
}

// And the most that their magnitudes can add up to.
template <Divergence kDivergence>
__device__ double TotalReach(const RowStatistics& sums, double inverse, double beta) {
  if constexpr (kDivergence == Divergence::kForwardKl) return 2.0;
  if constexpr (kDivergence == Divergence::kReverseKl) return static_cast<double>(sums.spread()) * inverse;
  return 0.8 - 4.0 * log(1.0 - beta);
}

// The most that the entropy's part can be in one entry of e^(s - largest): e^x |x + c| with x <= 0 is at most
// c or 1 / e.
__device__ inline double EntropyEntryReach(const GradientTerms& terms, double sum, double logit_mean) {
  return terms.delta == 0 ? 0.0 : fabs(terms.delta / sum) * (0.4 - logit_mean);
}

__device__ inline double TokenWeight(const TileRows& tile, int32_t row) {
  return tile.token_weights == nullptr ? 1.0 : tile.token_weights[row];
}

// Sets the factors of the row's entries, and its scale.
template <Divergence kDivergence>
__device__ void SetFactors(const TileRows& tile, const Distillation& options, int32_t row,
                           const SoftPart& whole, EntryFactors* out, RowEnd* end) {
  const RowStatistics& sums = whole.sums;
  const float own_logit = whole.logit;
  const float teacher_logit = whole.teacher_logit;
  const double inverse = 1.0 / static_cast<double>(options.temperature);
  const double own = exp(static_cast<double>(own_logit) - sums.largest);
  const double sum = sums.others + own;
  const double own_student = exp((static_cast<double>(own_logit) - sums.largest) * inverse);
  const double own_teacher = exp((static_cast<double>(teacher_logit) - sums.teacher_largest) * inverse);
  const double student_sum = (inverse == 1.0 ? sums.others : sums.student) + own_student;
  const double teacher_sum = sums.teacher + own_teacher;
  end->log_sum = log(sum);
  end->log_sum_exp = end->log_sum + sums.largest;
  end->surprise = own > sums.others ? log1p(sums.others / own) : end->log_sum_exp - own_logit;
  end->shift = (static_cast<double>(sums.teacher_largest) - sums.largest) * inverse + log(teacher_sum) -
               log(student_sum);
  end->own = {own_teacher / teacher_sum, own_student / student_sum,
              (static_cast<double>(teacher_logit) - own_logit) * inverse - end->shift};
  if constexpr (kDivergence == Divergence::kReverseKl) {
    const double own_difference =
        own_student > 0 ? own_student * (static_cast<double>(own_logit) - teacher_logit) : 0;
    end->mean = (sums.difference + own_difference) / student_sum * inverse;
  }
  end->slope = whole.slope;
  const double token_weight = TokenWeight(tile, row);
  const double class_weight = ClassWeight(tile, tile.labels[row]);
  const GradientTerms terms = GradientTermsOf(
      tile, row, token_weight, static_cast<double>(options.label_weight), class_weight, end->log_sum_exp);
  const double own_distance = static_cast<double>(own_logit) - sums.largest;
  end->target =
      TargetOf(terms, {sums.others, own, 0, sums.moment}, own_distance) - terms.gamma * class_weight;
  const double logit_mean = (sums.moment + (own > 0 ? own * own_distance : 0.0)) / sum;
  end->soft_factor = token_weight * tile.gradient_scales[row] * static_cast<double>(options.weight) * inverse;

  const double soft_reach =
      fabs(end->soft_factor) * Reach<kDivergence>(sums, student_sum, teacher_sum, inverse, options.beta);
  const double reach = fabs(terms.alpha / sum) +
                       fabs(terms.gamma) * static_cast<double>(tile.classes.largest) + soft_reach +
                       EntropyEntryReach(terms, sum, logit_mean);
  const int exponent = reach > 0 && isfinite(reach) ? ilogb(reach) + 1 : 0;
  // As in FormElementwise: a row that they are all 0 of has no say in what is common to rows.
  const double tau = reach > 0 ? static_cast<double>(tile.options.logit_scale) : 0.0;
  end->scale = static_cast<float>(ldexp(tau, exponent));
  const auto factor = [exponent](double value) { return static_cast<float>(ldexp(value, -exponent)); };
  *out = {false,
          sums.largest,
          sums.teacher_largest,
          static_cast<float>(inverse),
          static_cast<float>(1.0 / student_sum),
          static_cast<float>(1.0 / teacher_sum),
          static_cast<float>(end->shift),
          static_cast<float>(end->mean),
          factor(terms.alpha / sum),
          factor(terms.gamma),
          factor(end->soft_factor),
          factor(terms.delta / sum),
          terms.delta == 0 ? 0.0f : static_cast<float>(logit_mean)};
  // A bias is as if each row of X ended in a 1.
  const double largest = tile.bias == nullptr ? tile.largest[row] : fmaxf(tile.largest[row], 1.0f);
  const double soft_total = fabs(end->soft_factor) * TotalReach<kDivergence>(sums, inverse, options.beta);
  const double contribution = static_cast<double>(tile.options.logit_scale) *
                              fmax(fmax(fmax(fabs(terms.alpha), fabs(terms.beta)),
                                        fmax(fabs(terms.gamma) * fmax(tile.classes.sum, 1.0), soft_total)),
                                   EntropyReach(tile, terms));
  const bool in_range = isfinite(reach) && contribution * largest < kLargestContribution &&
                        fabs(static_cast<double>(end->scale)) * largest < kLargestScaledRow;
  out->overflowed = whole.overflowed != 0 || !isfinite(end->log_sum_exp) || !isfinite(end->shift) ||
                    !isfinite(soft_total) || (tile.gradient_wanted && !in_range);
}

// Entries

__device__ inline EntryPair<float> PairOf(const EntryFactors& factors, float s, float t) {
  const float below = (s - factors.largest) * factors.inverse;
  const float teacher_below = (t - factors.teacher_largest) * factors.inverse;
  // 0 below the range: times what a mask makes of d, a clamped exponential may be anything.
  const float q = IsClamped(below) ? 0.0f : Times(PlainExponential(below), factors.student);
  const float p = IsClamped(teacher_below) ? 0.0f : Times(PlainExponential(teacher_below), factors.teacher);
  return {p, q, __fmaf_rn(t - s, factors.inverse, -factors.shift)};
}

// One or two sums that make up D.
template <Divergence kDivergence, class Real>
__device__ void AddParts(const EntryPair<Real>& e, Real beta, Real (&parts)[2]) {
  if constexpr (kDivergence == Divergence::kForwardKl) {
    parts[0] += RelativeEntropyPart(e.p, e.q, e.d);
  } else if constexpr (kDivergence == Divergence::kReverseKl) {
    parts[0] += RelativeEntropyPart(e.q, e.p, -e.d);
  } else {
    const Mixture<Real> mixture = MixtureOf(e, beta);
    parts[0] += RelativeEntropyPart(e.p, mixture.m, mixture.log_p);
    parts[1] += RelativeEntropyPart(e.q, mixture.m, mixture.log_q);
  }
}

// ∂D/∂s T. `difference` is s - t over T.
template <Divergence kDivergence, class Real>
__device__ Real SoftGradient(const EntryPair<Real>& e, Real difference, Real mean, Real beta) {
  if constexpr (kDivergence == Divergence::kForwardKl) return Difference(e);
  if (!(e.q > 0)) return 0;
  if constexpr (kDivergence == Divergence::kReverseKl) return e.q * (difference - mean);
  return (1 - beta) * e.q * (MixtureOf(e, beta).log_q - mean);
}

// Every entry once: its parts of D, of smoothing's sum of C (largest - s), and its gradient.
template <Divergence kDivergence, bool kExact, bool kParts, bool kGradients, class T>
__device__ bool VisitEntries(const TileRows& tile, const RowLogits<kExact>& logits,
                             const EntryFactors& factors, float beta, T* gradients, double (&parts)[2],
                             double* smoothing) {
  const bool smooths = tile.options.label_smoothing != 0;
  bool bad = false;
  logits.template ForEach<kGradients>([&](int64_t first, int count, const float(&s)[kGroup],
                                          const float(&t)[kGroup], const float* slopes) {
    float group_parts[2] = {0, 0};
    float group_smoothing = 0;
    Eight<T> out;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float value = 0;
      if (logits.Counts(first, i, count)) {
        const EntryPair<float> e = PairOf(factors, s[i], t[i]);
        const float class_weight = smooths ? ClassWeight(tile, first + i) : 0.0f;
        if constexpr (kParts) {
          AddParts<kDivergence>(e, beta, group_parts);
          if (class_weight != 0.0f) {
            group_smoothing = __fmaf_rn(class_weight, factors.largest - s[i], group_smoothing);
          }
        }
        if constexpr (kGradients) {
          const float soft =
              SoftGradient<kDivergence>(e, (s[i] - t[i]) * factors.inverse, factors.mean, beta);
          value = factors.soft_factor * soft;
          if (factors.gradient_factor != 0 || factors.entropy_factor != 0) {
            const float below = s[i] - factors.largest;
            const float own =
                IsClamped(below)
                    ? factors.gradient_factor
                    : __fmaf_rn(-factors.entropy_factor, below - factors.logit_mean, factors.gradient_factor);
            value = __fmaf_rn(own, PlainExponential(below), value);
          }
          value = __fmaf_rn(-factors.smoothing_factor, class_weight, value) * slopes[i];
          if (!(fabsf(value) <= kLargestEntry)) {
            bad = true;
            value = 0;
          }
        }
      }
      if constexpr (kGradients) out.values[i] = static_cast<T>(value);
    }
    if constexpr (kParts) {
      parts[0] += group_parts[0];
      if constexpr (kDivergence == Divergence::kJensenShannon) parts[1] += group_parts[1];
      *smoothing += group_smoothing;
    }
    if constexpr (kGradients) *reinterpret_cast<Eight<T>*>(gradients + first) = out;
  });
  return bad;
}

// The end

__device__ inline void WriteOverflow(const TileRows& tile, int32_t row) {
  WriteRow(tile, row, OverflowedRow());
  if (tile.returns.divergence != nullptr) tile.returns.divergence[tile.batch_rows[row]] = NaN();
}

// Adds the label's entry to the sums over all others. The result is D.
template <Divergence kDivergence>
__device__ double AddLabel(const TileRows& tile, const Distillation& options, int32_t row,
                           const SoftPart& whole, SoftTerms* terms, RowEnd* end) {
  const auto beta = static_cast<double>(options.beta);
  double own_parts[2] = {0, 0};
  AddParts<kDivergence>(end->own, beta, own_parts);
  for (int i = 0; i < 2; ++i) terms->parts[i] += own_parts[i];
  if (tile.options.label_smoothing != 0) {
    terms->smoothing +=
        Weighted(ClassWeight(tile, tile.labels[row]), static_cast<double>(whole.sums.largest) - whole.logit);
  }
  if constexpr (kDivergence != Divergence::kJensenShannon) return terms->parts[0];
  end->mean = terms->parts[1];
  return beta * terms->parts[0] + (1.0 - beta) * terms->parts[1];
}

template <Divergence kDivergence>
__device__ void FinishSoftRow(const TileRows& tile, const Distillation& options, int32_t row,
                              const RowEnd& end, double divergence, const SoftTerms& terms) {
  const LossOptions& loss_options = tile.options;
  const double token_weight = TokenWeight(tile, row);
  const double class_weight = ClassWeight(tile, tile.labels[row]);
  double cost = Weighted((1.0 - loss_options.label_smoothing) * class_weight, end.surprise);
  if (loss_options.label_smoothing != 0) {
    cost += loss_options.label_smoothing / static_cast<double>(tile.whole_vocab) *
            (end.log_sum * tile.classes.sum - SmoothingSum(-terms.smoothing));
  }
  const double z_loss = ZLossOf(loss_options, end.log_sum_exp);
  const double loss = Weighted(options.label_weight, cost) + z_loss + Weighted(options.weight, divergence);
  const double tau = loss_options.logit_scale;
  const double soft =
      SoftGradient<kDivergence>(end.own, -end.own.d - end.shift, end.mean, static_cast<double>(options.beta));
  const auto target = static_cast<float>(tau * end.slope * (end.target + end.soft_factor * soft));
  const bool in_range = !tile.gradient_wanted || (isfinite(target) && terms.bad == 0);
  // Either is infinite where a logit is -infinity.
  if (isnan(divergence) || isnan(terms.smoothing) || !in_range) return WriteOverflow(tile, row);
  WriteRow(tile, row,
           {.loss = static_cast<float>(Weighted(token_weight, loss)),
            .log_sum_exp = static_cast<float>(end.log_sum_exp),
            .z_loss = static_cast<float>(token_weight * z_loss),
            .log_probability = static_cast<float>(-end.surprise),
            .scale = end.scale,
            .target_gradient = IsOwn(tile, tile.labels[row]) ? target : 0.0f});
  if (tile.returns.divergence != nullptr) {
    tile.returns.divergence[tile.batch_rows[row]] = static_cast<float>(divergence);
  }
}

// What is read and written of a row, for every thread of its block.

template <bool kExact>
__device__ RowLogits<kExact> LogitsOf(const TileRows& tile, const SoftTargets& targets, int64_t place,
                                      int32_t row) {
  return {LogitMaker<kExact>(targets.sums + place * targets.stride, tile.bias, tile.options),
          LogitMaker<kExact>(targets.teacher_sums + place * targets.stride, targets.teacher_bias,
                             targets.teacher_options),
          tile.vocab, targets.stride, tile.labels[row]};
}

// Null: none is wanted.
template <class T>
__device__ T* GradientsOf(const SoftTargets& targets, int32_t row) {
  return targets.gradients == nullptr ? nullptr : static_cast<T*>(targets.gradients) + row * targets.stride;
}

template <class T>
__device__ void ClearGradients(const SoftTargets& targets, T* gradients) {
  if (gradients == nullptr) return;
  for (int64_t v = threadIdx.x; v < targets.stride; v += kThreads) gradients[v] = static_cast<T>(0.0f);
}

// What the entries of the tile's vocabulary make of a row; the label's is part of it if it is one of them.
template <Divergence kDivergence, bool kExact>
__device__ SoftPart FindSoftPart(const TileRows& tile, const SoftTargets& targets,
                                 const RowLogits<kExact>& logits, int32_t row) {
  SoftPart part;
  if (IsOwn(tile, tile.labels[row])) {
    part.logit = tile.target_logits[row];
    part.has_label = 1;
    part.teacher_logit = targets.teacher_target_logits[row];
    if (tile.options.softcap != 0) part.slope = tile.target_slopes[row];
  }
  part.overflowed = tile.overflowed[row] != 0 || targets.teacher_overflowed[row] != 0 ? 1 : 0;
  part.sums =
      Summarise<kDivergence>(logits, 1.0f / targets.options.temperature, part.logit, part.teacher_logit);
  return part;
}

// The sums of all threads, for all of them.
template <Divergence kDivergence>
__device__ SoftTerms TermsOfBlock(const double (&parts)[2], double smoothing) {
  SoftTerms terms;
  terms.parts[0] = SumOfBlock(parts[0]);
  if constexpr (kDivergence == Divergence::kJensenShannon) terms.parts[1] = SumOfBlock(parts[1]);
  terms.smoothing = SumOfBlock(smoothing);
  return terms;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_SOFT_ROWS_CUH_
