#include "kernels/cpu/soft_targets.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/constants.h"
#include "kernels/cpu/divergence.h"
#include "kernels/cpu/library_products.h"
#include "kernels/cpu/pack_rows.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd_products.h"

namespace lossd::kernels::cpu {
namespace {

// Entries that are worked on at once: they lie in one block of either head.
constexpr int64_t kSegment = kBlock;
static_assert(kLibraryBlock % kSegment == 0);
using Values = std::array<float, kSegment>;

const float* At(const float* logits, const Workspace& tile, int64_t r, int64_t entry) {
  const int64_t block = entry / tile.block_columns;
  return logits + tile.ExponentialsIndex(block, r) + (entry - block * tile.block_columns);
}

// Turns the values of a product into logits.
void ToLogits(const SimdKernels& kernels, const float* bias, float scale, float cap, int64_t count,
              float* values) {
  if (bias != nullptr) {
    for (int64_t i = 0; i < count; ++i) values[i] += bias[i];
  }
  if (scale != 1.0f) {
    for (int64_t i = 0; i < count; ++i) values[i] *= scale;
  }
  Values slopes;
  if (cap > 0) kernels.cap_row(values, slopes.data(), count, cap);
}

const float* From(const float* array, int64_t first) { return array == nullptr ? nullptr : array + first; }

// Logits of rows of the teacher into soft.teacher_logits, block by block.
bool MultiplyTeacher(const WeightMatrix& weight, const HiddenStates& x, const SoftTile& soft,
                     Products& products, int64_t threads) {
  const Workspace& tile = soft.teacher;
  PackRows(x, weight.type, tile, products, threads);
  std::atomic<bool> failed = false;
  ParallelFor(threads, tile.blocks, [&](int64_t block, int64_t thread) {
    for (int64_t begin = 0; begin < tile.padded_rows; begin += products.logit_rows()) {
      const Range rows{begin, std::min(begin + products.logit_rows(), tile.padded_rows)};
      const float* values = products.MultiplyLogits(block, rows, tile.Scratch(thread));
      if (values == nullptr) {
        failed = true;
        return;
      }
      float* to = soft.teacher_logits + tile.ExponentialsIndex(block, begin);
      const int64_t count = std::min(rows.end, tile.rows) - begin;
      if (values == to || count <= 0) continue;
      std::memcpy(to, values, static_cast<size_t>(count * tile.block_columns) * sizeof(float));
    }
  });
  return !failed;
}

// One or two parts of D of each entry.
void FillParts(const Distillation& options, const Values& p, const Values& q, const Values& d, int64_t count,
               Values* parts, Values* more_parts) {
  switch (options.divergence) {
    case Divergence::kForwardKl:
      for (int64_t i = 0; i < count; ++i) (*parts)[i] = RelativeEntropyPart(p[i], q[i], d[i]);
      return;
    case Divergence::kReverseKl:
      for (int64_t i = 0; i < count; ++i) (*parts)[i] = RelativeEntropyPart(q[i], p[i], -d[i]);
      return;
    case Divergence::kJensenShannon:
      for (int64_t i = 0; i < count; ++i) {
        const Mixture<float> mixture = MixtureOf(EntryPair<float>{p[i], q[i], d[i]}, options.beta);
        (*parts)[i] = RelativeEntropyPart(p[i], mixture.m, mixture.log_p);
        (*more_parts)[i] = RelativeEntropyPart(q[i], mixture.m, mixture.log_q);
      }
      return;
  }
}

// ∂D/∂s T of an entry; `difference` is (s − t) / T.
template <class Real>
Real Slope(const Distillation& options, const EntryPair<Real>& e, Real difference, Real mean) {
  switch (options.divergence) {
    case Divergence::kForwardKl:
      return Difference(e);
    case Divergence::kReverseKl:
      return e.q * (difference - mean);
    case Divergence::kJensenShannon:
      break;
  }
  const auto beta = static_cast<Real>(options.beta);
  return (1 - beta) * e.q * (MixtureOf(e, beta).log_q - mean);
}

// No more than the sum of the magnitudes of all ∂D/∂s T.
double ReachOf(const Distillation& options, double spread) {
  switch (options.divergence) {
    case Divergence::kForwardKl:
      return 2.0;
    case Divergence::kReverseKl:
      return spread;
    case Divergence::kJensenShannon:
      break;
  }
  return 0.8 - 4.0 * std::log(1.0 - static_cast<double>(options.beta));
}

}  // namespace

struct SoftTargets::Segment {
  int64_t first = 0;
  int64_t count = 0;
  Values s;
  Values t;
};

SoftTargets::SoftTargets(const LinearCrossEntropyParams& params, const SimdKernels& kernels,
                         const Workspace& tile, const SoftTile& soft)
    : params_(params),
      teacher_(*params.teacher),
      kernels_(kernels),
      tile_(tile),
      soft_(soft),
      inverse_(1.0f / params.distillation.temperature) {}

bool SoftTargets::MultiplyTeacherLogits(int64_t threads) const {
  const WeightMatrix weight{teacher_.weight_type, teacher_.weight, params_.vocab, teacher_.hidden};
  const HiddenStates x{teacher_.hidden_type, teacher_.hidden_states, teacher_.hidden};
  if (BestArithmetic(weight.type) == Arithmetic::kSimd) {
    SimdProducts products(kernels_, weight, soft_.teacher);
    return MultiplyTeacher(weight, x, soft_, products, threads);
  }
  LibraryProducts products(weight, soft_.teacher);
  return MultiplyTeacher(weight, x, soft_, products, threads);
}

void SoftTargets::Keep(int64_t block, Range rows, const float* values) const {
  const int64_t count = std::min(rows.end, tile_.rows) - rows.begin;
  if (count <= 0) return;
  std::memcpy(soft_.logits + tile_.ExponentialsIndex(block, rows.begin), values,
              static_cast<size_t>(count * tile_.block_columns) * sizeof(float));
}

void SoftTargets::CopyKept(int64_t block, Range rows, float* values) const {
  const int64_t count = std::min(rows.end, tile_.rows) - rows.begin;
  if (count <= 0) return;
  std::memcpy(values, soft_.logits + tile_.ExponentialsIndex(block, rows.begin),
              static_cast<size_t>(count * tile_.block_columns) * sizeof(float));
}

void SoftTargets::ReadTeacher(int64_t r, int64_t first, int64_t count, float* logits) const {
  std::copy_n(At(soft_.teacher_logits, soft_.teacher, r, first), count, logits);
  ToLogits(kernels_, From(teacher_.bias, first), teacher_.logit_scale, teacher_.softcap, count, logits);
}

template <class Function>
void SoftTargets::ForEachSegment(int64_t r, Function function) const {
  const LossOptions& options = params_.options;
  Segment segment;
  for (int64_t first = 0; first < params_.vocab; first += kSegment) {
    segment.first = first;
    segment.count = std::min(kSegment, params_.vocab - first);
    std::copy_n(At(soft_.logits, tile_, r, first), segment.count, segment.s.data());
    ToLogits(kernels_, From(params_.bias, first), options.logit_scale, options.softcap, segment.count,
             segment.s.data());
    ReadTeacher(r, first, segment.count, segment.t.data());
    function(segment);
  }
}

void SoftTargets::Summarise(int64_t r) const {
  SoftRow row{};
  float spread = 0;
  if (FindLargest(r, &row, &spread)) {
    SumExponentials(r, &row);
    FinishDivergence(r, &row);
    row.reach = ReachOf(params_.distillation, static_cast<double>(spread) * inverse_);
    row.finite = std::isfinite(row.divergence) && std::isfinite(row.reach);
  }
  soft_.rows[r] = row;
}

// False if a logit is not finite.
bool SoftTargets::FindLargest(int64_t r, SoftRow* row, float* spread) const {
  row->largest = -kInfinity;
  row->teacher_largest = -kInfinity;
  float most = -kInfinity;
  float least = kInfinity;
  int64_t not_finite = 0;
  ForEachSegment(r, [&](const Segment& segment) {
    not_finite += CountNonFinite(DataType::kFloat32, segment.s.data(), segment.count) +
                  CountNonFinite(DataType::kFloat32, segment.t.data(), segment.count);
    row->largest = std::max(row->largest, kernels_.max_row(segment.s.data(), segment.count));
    row->teacher_largest = std::max(row->teacher_largest, kernels_.max_row(segment.t.data(), segment.count));
    for (int64_t i = 0; i < segment.count; ++i) {
      most = std::max(most, segment.s[i] - segment.t[i]);
      least = std::min(least, segment.s[i] - segment.t[i]);
    }
  });
  *spread = most - least;
  return not_finite == 0;
}

void SoftTargets::SumExponentials(int64_t r, SoftRow* row) const {
  double student = 0;
  double teacher = 0;
  double difference = 0;
  ForEachSegment(r, [&](const Segment& segment) {
    Values exponentials;
    for (int64_t i = 0; i < segment.count; ++i) {
      exponentials[i] = (segment.t[i] - row->teacher_largest) * inverse_;
    }
    teacher += kernels_.exp_row(exponentials.data(), segment.count, 0, 0);
    for (int64_t i = 0; i < segment.count; ++i) {
      exponentials[i] = (segment.s[i] - row->largest) * inverse_;
    }
    student += kernels_.exp_row(exponentials.data(), segment.count, 0, 0);
    if (params_.distillation.divergence != Divergence::kReverseKl) return;
    for (int64_t i = 0; i < segment.count; ++i) {
      difference += static_cast<double>(exponentials[i]) * (segment.s[i] - segment.t[i]);
    }
  });
  row->student = static_cast<float>(1.0 / student);
  row->teacher = static_cast<float>(1.0 / teacher);
  row->shift = static_cast<float>((static_cast<double>(row->teacher_largest) - row->largest) * inverse_ +
                                  std::log(teacher) - std::log(student));
  row->mean = static_cast<float>(difference / student * inverse_);
}

void SoftTargets::Probabilities(const SoftRow& row, const float* s, const float* t, int64_t count, float* p,
                                float* q) const {
  for (int64_t i = 0; i < count; ++i) {
    p[i] = (t[i] - row.teacher_largest) * inverse_;
    q[i] = (s[i] - row.largest) * inverse_;
  }
  kernels_.exp_row(p, count, 0, 0);
  kernels_.exp_row(q, count, 0, 0);
  for (int64_t i = 0; i < count; ++i) {
    p[i] *= row.teacher;
    q[i] *= row.student;
  }
}

void SoftTargets::FinishDivergence(int64_t r, SoftRow* row) const {
  const Distillation& options = params_.distillation;
  const int64_t label = tile_.row_states[r].label;
  double parts = 0;
  double more_parts = 0;
  EntryPair<double> own{};
  double own_difference = 0;
  ForEachSegment(r, [&](const Segment& segment) {
    Values p;
    Values q;
    Values d;
    Values part;
    Values more;
    Probabilities(*row, segment.s.data(), segment.t.data(), segment.count, p.data(), q.data());
    for (int64_t i = 0; i < segment.count; ++i) {
      d[i] = (segment.t[i] - segment.s[i]) * inverse_ - row->shift;
    }
    FillParts(options, p, q, d, segment.count, &part, &more);
    parts += kernels_.sum_row(part.data(), nullptr, segment.count);
    if (options.divergence == Divergence::kJensenShannon) {
      more_parts += kernels_.sum_row(more.data(), nullptr, segment.count);
    }
    const int64_t i = label - segment.first;
    if (i < 0 || i >= segment.count) return;
    own = {p[i], q[i], d[i]};
    own_difference = static_cast<double>(segment.s[i] - segment.t[i]) * inverse_;
  });
  row->divergence = parts;
  if (options.divergence == Divergence::kJensenShannon) {
    const auto beta = static_cast<double>(options.beta);
    row->divergence = beta * parts + (1 - beta) * more_parts;
    row->mean = static_cast<float>(more_parts);
  }
  row->label_slope = Slope<double>(options, own, own_difference, row->mean);
}

void SoftTargets::AddGradient(int64_t block, int64_t r, const float* logits, float* values) const {
  const SoftRow& row = soft_.rows[r];
  const int64_t begin = block * tile_.block_columns;
  const int64_t end = std::min(begin + tile_.block_columns, params_.vocab);
  for (int64_t first = begin; first < end; first += kSegment) {
    const int64_t count = std::min(kSegment, end - first);
    const float* s = logits + (first - begin);
    float* out = values + (first - begin);
    Values t;
    Values p;
    Values q;
    ReadTeacher(r, first, count, t.data());
    Probabilities(row, s, t.data(), count, p.data(), q.data());
    for (int64_t i = 0; i < count; ++i) {
      const EntryPair<float> e{p[i], q[i], (t[i] - s[i]) * inverse_ - row.shift};
      out[i] += row.factor * Slope<float>(params_.distillation, e, (s[i] - t[i]) * inverse_, row.mean);
    }
  }
}

}  // namespace lossd::kernels::cpu
