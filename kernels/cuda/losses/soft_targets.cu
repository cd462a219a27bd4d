#include "kernels/cuda/losses/divergence.cuh"
#include "kernels/cuda/losses/soft_sums.cuh"
#include "kernels/cuda/losses/soft_targets.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {
namespace {

// Entries are at most 1 in magnitude, but for roundings: more than that is none.
constexpr float kLargestEntry = 8.0f;

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
  float scale;
};

// The most that ∂D/∂s T can be in one entry.
template <Divergence kDivergence>
__device__ double Reach(const RowStatistics& sums, double student_sum, double teacher_sum, double inverse,
                        double beta) {
  const double spread = static_cast<double>(sums.spread) * inverse;
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
  if constexpr (kDivergence == Divergence::kReverseKl) return static_cast<double>(sums.spread) * inverse;
  return 0.8 - 4.0 * log(1.0 - beta);
}

__device__ inline double TokenWeight(const TileRows& tile, int32_t row) {
  return tile.token_weights == nullptr ? 1.0 : tile.token_weights[row];
}

// Sets the factors of the row's entries, and its scale.
template <Divergence kDivergence>
__device__ void SetFactors(const TileRows& tile, const SoftTargets& targets, int32_t row,
                           const RowStatistics& sums, float own_logit, float teacher_logit, EntryFactors* out,
                           RowEnd* end) {
  const Distillation& options = targets.options;
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
    const double own_difference = own_student * (static_cast<double>(own_logit) - teacher_logit);
    end->mean = (sums.difference + own_difference) / student_sum * inverse;
  }
  const double token_weight = TokenWeight(tile, row);
  const double class_weight = ClassWeight(tile, tile.labels[row]);
  const GradientTerms terms = GradientTermsOf(
      tile, row, token_weight, static_cast<double>(options.label_weight), class_weight, end->log_sum_exp);
  end->target = -terms.beta * (sums.others / sum) - terms.gamma * class_weight;
  if (terms.rest != 0) end->target += terms.rest * (own / sum);
  end->soft_factor = token_weight * tile.gradient_scales[row] * static_cast<double>(options.weight) * inverse;

  const double soft_reach =
      fabs(end->soft_factor) * Reach<kDivergence>(sums, student_sum, teacher_sum, inverse, options.beta);
  const double reach =
      fabs(terms.alpha / sum) + fabs(terms.gamma) * static_cast<double>(tile.classes.largest) + soft_reach;
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
          factor(end->soft_factor)};
  // A bias is as if each row of X ended in a 1.
  const double largest = tile.bias == nullptr ? tile.largest[row] : fmaxf(tile.largest[row], 1.0f);
  const double soft_total = fabs(end->soft_factor) * TotalReach<kDivergence>(sums, inverse, options.beta);
  const double contribution = static_cast<double>(tile.options.logit_scale) *
                              fmax(fmax(fabs(terms.alpha), fabs(terms.beta)),
                                   fmax(fabs(terms.gamma) * fmax(tile.classes.sum, 1.0), soft_total));
  const bool in_range = isfinite(reach) && contribution * largest < kLargestContribution &&
                        fabs(static_cast<double>(end->scale)) * largest < kLargestScaledRow;
  out->overflowed = tile.overflowed[row] != 0 || targets.teacher_overflowed[row] != 0 ||
                    !isfinite(end->log_sum_exp) || !isfinite(end->shift) ||
                    (tile.gradient_wanted && !in_range);
}

// Entries

__device__ inline EntryPair<float> PairOf(const EntryFactors& factors, float s, float t) {
  const float q = Times(PlainExponential((s - factors.largest) * factors.inverse), factors.student);
  const float p = Times(PlainExponential((t - factors.teacher_largest) * factors.inverse), factors.teacher);
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
  logits.template ForEach<kGradients>(
      [&](int64_t first, int count, const float(&s)[kGroup], const float(&t)[kGroup], const float* slopes) {
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
              group_smoothing = __fmaf_rn(class_weight, factors.largest - s[i], group_smoothing);
            }
            if constexpr (kGradients) {
              const float soft =
                  SoftGradient<kDivergence>(e, (s[i] - t[i]) * factors.inverse, factors.mean, beta);
              value = factors.soft_factor * soft;
              if (factors.gradient_factor != 0) {
                value = __fmaf_rn(factors.gradient_factor, PlainExponential(s[i] - factors.largest), value);
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
  WriteRow(tile, row, {NaN(), NaN(), NaN(), NaN(), NaN(), NaN(), 0.0f, 0.0f, true});
  if (tile.returns.divergence != nullptr) tile.returns.divergence[tile.batch_rows[row]] = NaN();
}

template <Divergence kDivergence>
__device__ void FinishSoftRow(const TileRows& tile, const Distillation& options, int32_t row,
                              const RowEnd& end, double divergence, double smoothing, bool bad) {
  const LossOptions& loss_options = tile.options;
  const double token_weight = TokenWeight(tile, row);
  const double class_weight = ClassWeight(tile, tile.labels[row]);
  double cost = (1.0 - loss_options.label_smoothing) * class_weight * end.surprise;
  if (loss_options.label_smoothing != 0) {
    cost += loss_options.label_smoothing / static_cast<double>(tile.vocab) *
            (end.log_sum * tile.classes.sum + smoothing);
  }
  const double z_loss = ZLossOf(loss_options, end.log_sum_exp);
  const double loss = static_cast<double>(options.label_weight) * cost + z_loss +
                      static_cast<double>(options.weight) * divergence;
  const double tau = loss_options.logit_scale;
  const double slope = loss_options.softcap != 0 ? tile.target_slopes[row] : 1.0;
  const double soft =
      SoftGradient<kDivergence>(end.own, -end.own.d - end.shift, end.mean, static_cast<double>(options.beta));
  const auto target = static_cast<float>(tau * slope * (end.target + end.soft_factor * soft));
  const bool in_range = !tile.gradient_wanted || (isfinite(target) && !bad);
  if (!isfinite(divergence) || !isfinite(smoothing) || !in_range) return WriteOverflow(tile, row);
  WriteRow(tile, row,
           {static_cast<float>(token_weight * loss), static_cast<float>(end.log_sum_exp),
            static_cast<float>(token_weight * z_loss), static_cast<float>(-end.surprise), end.scale, target,
            0.0f, 0.0f, false});
  if (tile.returns.divergence != nullptr) {
    tile.returns.divergence[tile.batch_rows[row]] = static_cast<float>(divergence);
  }
}

template <Divergence kDivergence, class T>
__global__ void __launch_bounds__(kThreads)
    FinishSoftRowsKernel(const TileRows tile, int32_t first_row, const SoftTargets targets) {
  AwaitPreviousKernel();
  constexpr bool kExact = sizeof(T) == sizeof(float);
  // D is needed before the gradient.
  constexpr bool kThirdPass = kDivergence == Divergence::kJensenShannon;
  const auto place = static_cast<int64_t>(blockIdx.x);
  const int32_t row = first_row + static_cast<int32_t>(blockIdx.x);
  const float own_logit = tile.target_logits[row];
  const float teacher_logit = targets.teacher_target_logits[row];
  const RowLogits<kExact> logits{
      LogitMaker<kExact>(targets.sums + place * targets.stride, tile.bias, tile.options),
      LogitMaker<kExact>(targets.teacher_sums + place * targets.stride, targets.teacher_bias,
                         targets.teacher_options),
      tile.vocab, targets.stride, tile.labels[row]};
  T* const gradients =
      targets.gradients == nullptr ? nullptr : static_cast<T*>(targets.gradients) + row * targets.stride;
  const float beta = targets.options.beta;
  const RowStatistics sums =
      Summarise<kDivergence>(logits, 1.0f / targets.options.temperature, own_logit, teacher_logit);
  __shared__ EntryFactors shared_factors;
  RowEnd end{};
  if (threadIdx.x == 0) {
    SetFactors<kDivergence>(tile, targets, row, sums, own_logit, teacher_logit, &shared_factors, &end);
  }
  __syncthreads();
  EntryFactors factors = shared_factors;
  double parts[2] = {0, 0};
  double smoothing = 0;
  bool bad = false;
  if (factors.overflowed) {
    if (gradients != nullptr) {
      for (int64_t v = threadIdx.x; v < targets.stride; v += kThreads) gradients[v] = static_cast<T>(0.0f);
    }
    if (threadIdx.x == 0) WriteOverflow(tile, row);
    return;
  }
  if (kThirdPass || gradients == nullptr) {
    VisitEntries<kDivergence, kExact, true, false, T>(tile, logits, factors, beta, nullptr, parts,
                                                      &smoothing);
  } else {
    bad = VisitEntries<kDivergence, kExact, true, true, T>(tile, logits, factors, beta, gradients, parts,
                                                           &smoothing);
  }
  parts[0] = SumOfBlock(parts[0]);
  if constexpr (kThirdPass) parts[1] = SumOfBlock(parts[1]);
  smoothing = SumOfBlock(smoothing);
  double divergence = 0;
  if (threadIdx.x == 0) {
    double own_parts[2] = {0, 0};
    AddParts<kDivergence>(end.own, static_cast<double>(beta), own_parts);
    for (int i = 0; i < 2; ++i) parts[i] += own_parts[i];
    divergence = parts[0];
    if constexpr (kThirdPass) {
      divergence = static_cast<double>(beta) * parts[0] + (1.0 - static_cast<double>(beta)) * parts[1];
      end.mean = parts[1];
      shared_factors.mean = static_cast<float>(parts[1]);
    }
    if (tile.options.label_smoothing != 0) {
      smoothing += static_cast<double>(ClassWeight(tile, tile.labels[row])) *
                   (static_cast<double>(sums.largest) - own_logit);
    }
  }
  if constexpr (kThirdPass) {
    __syncthreads();
    factors.mean = shared_factors.mean;
    if (gradients != nullptr) {
      bad = VisitEntries<kDivergence, kExact, false, true, T>(tile, logits, factors, beta, gradients, parts,
                                                              &smoothing);
    }
  }
  const bool any_bad = __syncthreads_or(bad ? 1 : 0) != 0;
  if (threadIdx.x == 0) {
    FinishSoftRow<kDivergence>(tile, targets.options, row, end, divergence, smoothing, any_bad);
  }
}

// Calls function(kernel) with the kernel for this divergence.
template <class T, class Function>
void WithKernel(Divergence divergence, Function function) {
  switch (divergence) {
    case Divergence::kForwardKl:
      return function(FinishSoftRowsKernel<Divergence::kForwardKl, T>);
    case Divergence::kReverseKl:
      return function(FinishSoftRowsKernel<Divergence::kReverseKl, T>);
    case Divergence::kJensenShannon:
      return function(FinishSoftRowsKernel<Divergence::kJensenShannon, T>);
  }
}

}  // namespace

Result FinishSoftRows(const TileRows& tile, int32_t first, int32_t rows, const SoftTargets& targets,
                      cudaStream_t stream) {
  Result result;
  WithType(tile.type, [&](auto type) {
    WithKernel<decltype(type)>(targets.options.divergence, [&](auto kernel) {
      result = LaunchRows("FinishSoftRows", {Blocks(rows, 1)}, tile, stream, kernel, first, targets);
    });
  });
  return result;
}

Result LoadSoftTargetKernels(DataType weight_type) {
  KernelLoader loader;
  WithType(weight_type, [&](auto type) {
    for (const Divergence divergence :
         {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJensenShannon}) {
      WithKernel<decltype(type)>(divergence, [&](auto kernel) { loader.Add(kernel); });
    }
  });
  return loader.result();
}

}  // namespace lossd::kernels::cuda
