// The logits of a row of both heads, and the sums of them that its loss and its divergence are made of.
#ifndef LOSSD_KERNELS_CUDA_LOSSES_SOFT_SUMS_CUH_
#define LOSSD_KERNELS_CUDA_LOSSES_SOFT_SUMS_CUH_

#include "kernels/cuda/losses/soft_parts.h"
#include "kernels/cuda/rows/row_kernels.cuh"

namespace lossd::kernels::cuda {

inline constexpr int kGroup = 8;  // entries that a thread works on at once

// Logits

// Makes one head's logits out of sums. kExact: for fp32 heads; otherwise with the device's own exponential.
template <bool kExact>
struct LogitMaker {
  const float* sums;  // of the row
  const float* bias;
  float scale;
  float cap;
  FastLogitCap fast_cap;

  __device__ LogitMaker(const float* row_sums, const float* head_bias, const LossOptions& options)
      : sums(row_sums),
        bias(head_bias),
        scale(options.logit_scale),
        cap(options.softcap),
        fast_cap(options.softcap) {}

  __device__ CappedLogit<float> Cap(float z) const {
    if constexpr (!kExact) return fast_cap(z);
    CappedLogit<float> s = CapLogit(z, cap);
    // No product is to be fused with what becomes of it, which is not the same in every kernel.
    s.value = __fadd_rn(s.value, 0.0f);
    return s;
  }

  // Entries [first, first + kGroup), of which `count` are there. Slopes may be null.
  __device__ void Read(int64_t first, int count, float (&logits)[kGroup], float* slopes) const {
    const auto sum = *reinterpret_cast<const Eight<float>*>(sums + first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float z = sum.values[i];
      if (bias != nullptr && i < count) z += bias[first + i];
      logits[i] = __fmul_rn(z, scale);
      if (slopes != nullptr) slopes[i] = 1.0f;
    }
    if (cap == 0) return;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const CappedLogit<float> s = Cap(logits[i]);
      logits[i] = s.value;
      if (slopes != nullptr) slopes[i] = s.slope;
    }
  }
};

template <bool kExact>
struct RowLogits {
  LogitMaker<kExact> own;
  LogitMaker<kExact> teacher;
  int64_t vocab;
  int64_t stride;
  int32_t label;

  // Calls function(first, count, s, t, slopes) for every group of this thread.
  template <bool kSlopes, class Function>
  __device__ void ForEach(Function function) const {
    for (int64_t first = static_cast<int64_t>(threadIdx.x) * kGroup; first < stride;
         first += static_cast<int64_t>(kThreads) * kGroup) {
      const auto count = static_cast<int>(min(static_cast<int64_t>(kGroup), vocab - first));
      float s[kGroup];
      float t[kGroup];
      float slopes[kGroup];
      own.Read(first, count, s, kSlopes ? slopes : nullptr);
      teacher.Read(first, count, t, nullptr);
      function(first, count, s, t, slopes);
    }
  }
  // Whether the entry counts in sums over all but the label's.
  __device__ bool Counts(int64_t first, int i, int count) const { return i < count && first + i != label; }
};

// Sums

__device__ inline float PlainExponential(float z) { return ScaledExponential(0.0f, 0).WithoutOffset(z); }
// Whether that was clamped: it is then nothing to be multiplied by z.
__device__ inline bool IsClamped(float z) { return ScaledExponential(0.0f, 0).IsBelow(z); }

// Whether s - t of an entry counts. Below this a mask's q is 0, and KL(q ‖ p) has nothing of the entry.
template <Divergence kDivergence>
__device__ bool HasDifference(float s) {
  constexpr float kRuledOut = -0x1p100f;
  return kDivergence != Divergence::kReverseKl || s > kRuledOut;
}

// Sums of one head in one thread, over an offset that follows the largest logit at some distance: moving it
// is rare, and done in fp64.
struct RunningSums {
  float offset = -kInfinity;
  double sums[3] = {0, 0, 0};
  double moment = 0;  // of the first: times what its exponentials are of

  __device__ void Reach(float largest, float slack, const double (&rates)[3]) {
    if (!(largest > offset + slack)) return;
    Move(largest, rates);
    offset = largest;
  }
  // Rescales the sums to the offset `to`, which is not below any logit.
  __device__ void Move(float to, const double (&rates)[3]) {
    if (offset == -kInfinity) {  // of logits that were all ruled out
      *this = RunningSums();
      return;
    }
    const double distance = static_cast<double>(offset) - to;
    moment = sums[0] == 0 ? 0 : (moment + distance * sums[0]) * exp(distance * rates[0]);
#pragma unroll
    for (int i = 0; i < 3; ++i) sums[i] = sums[i] == 0 ? 0 : sums[i] * exp(distance * rates[i]);
  }
};

// `own_logit` and `teacher_logit` are the label's; -infinity: it is not among these entries.
template <Divergence kDivergence, bool kExact>
__device__ RowStatistics Summarise(const RowLogits<kExact>& logits, float inverse, float own_logit,
                                   float teacher_logit) {
  // The own head's sums are at temperature 1, at T, and of differences; the teacher's at T.
  const double rates[3] = {1.0, inverse, inverse};
  const double teacher_rates[3] = {inverse, inverse, inverse};
  const float slack = 16.0f * fminf(1.0f, 1.0f / inverse);
  const bool same = inverse == 1.0f;
  RunningSums own;
  RunningSums teacher;
  float largest = -kInfinity;
  float teacher_largest = -kInfinity;
  float most = -kInfinity;
  float least = kInfinity;
  logits.template ForEach<false>(
      [&](int64_t first, int count, const float(&s)[kGroup], const float(&t)[kGroup], const float*) {
        float group_largest = -kInfinity;
        float group_teacher = -kInfinity;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (!logits.Counts(first, i, count)) continue;
          group_largest = fmaxf(group_largest, s[i]);
          group_teacher = fmaxf(group_teacher, t[i]);
          if (!HasDifference<kDivergence>(s[i])) continue;
          most = fmaxf(most, s[i] - t[i]);  // without those of two masks, which are NaN
          least = fminf(least, s[i] - t[i]);
        }
        if (group_largest == -kInfinity && group_teacher == -kInfinity) return;  // of nothing that counts
        largest = fmaxf(largest, group_largest);
        teacher_largest = fmaxf(teacher_largest, group_teacher);
        own.Reach(group_largest, slack, rates);
        teacher.Reach(group_teacher, slack, teacher_rates);
        float sums[4] = {};
        float moment = 0;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (!logits.Counts(first, i, count)) continue;
          const float below = s[i] - own.offset;
          const float plain = PlainExponential(below);
          const float soft = same ? plain : PlainExponential(below * inverse);
          sums[0] += plain;
          if (below > -kInfinity && !IsClamped(below)) moment = __fmaf_rn(plain, below, moment);
          sums[1] += soft;
          if constexpr (kDivergence == Divergence::kReverseKl) {
            if (HasDifference<kDivergence>(s[i])) sums[2] = __fmaf_rn(soft, s[i] - t[i], sums[2]);
          }
          sums[3] += PlainExponential((t[i] - teacher.offset) * inverse);
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) own.sums[i] += sums[i];
        own.moment += moment;
        teacher.sums[0] += sums[3];
      });
  RowStatistics all;
  all.largest = fmaxf(own_logit, MaximumOfBlock(largest));
  all.teacher_largest = fmaxf(teacher_logit, MaximumOfBlock(teacher_largest));
  all.most = MaximumOfBlock(most);
  all.least = -MaximumOfBlock(-least);
  if (HasDifference<kDivergence>(own_logit)) {
    all.most = fmaxf(own_logit - teacher_logit, all.most);
    all.least = fminf(own_logit - teacher_logit, all.least);
  }
  own.Move(all.largest, rates);
  teacher.Move(all.teacher_largest, teacher_rates);
  all.others = SumOfBlock(own.sums[0]);
  all.moment = SumOfBlock(own.moment);
  all.student = SumOfBlock(own.sums[1]);
  all.teacher = SumOfBlock(teacher.sums[0]);
  if constexpr (kDivergence == Divergence::kReverseKl) all.difference = SumOfBlock(own.sums[2]);
  return all;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_LOSSES_SOFT_SUMS_CUH_
