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
constexpr int64_t kPiece = kBlock;
static_assert(kLibraryBlock % kPiece == 0);
using Values = std::array<float, kPiece>;

// A mask's logits are below this: their q is 0, whatever the teacher's are.
constexpr float kRuledOut = -0x1p100f;

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
bool MultiplyTeacher(const SoftTile& soft, Products& products, int64_t threads) {
  const Workspace& tile = soft.teacher;
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

}  // namespace

struct SoftTargets::Piece {
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

template <class Function>
auto SoftTargets::WithTeacherProducts(const Function& function) const {
  const WeightMatrix weight{teacher_.weight_type, teacher_.weight, params_.vocab, teacher_.hidden};
  if (BestArithmetic(weight.type) == Arithmetic::kSimd) {
    SimdProducts products(kernels_, weight, soft_.teacher);
    return function(products);
  }
  LibraryProducts products(weight, soft_.teacher);
  return function(products);
}

void SoftTargets::PackTeacherRows(int64_t threads) const {
  const HiddenStates x{teacher_.hidden_type, teacher_.hidden_states, teacher_.hidden};
  WithTeacherProducts(
      [&](Products& products) { PackRows(x, teacher_.weight_type, soft_.teacher, products, threads); });
}

bool SoftTargets::MultiplyTeacherLogits(int64_t threads) const {
  return WithTeacherProducts([&](Products& products) { return MultiplyTeacher(soft_, products, threads); });
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
void SoftTargets::ForEachPiece(int64_t r, Function function) const {
  const LossOptions& options = params_.options;
  Piece piece;
  for (int64_t first = 0; first < params_.vocab; first += kPiece) {
    piece.first = first;
    piece.count = std::min(kPiece, params_.vocab - first);
    std::copy_n(At(soft_.logits, tile_, r, first), piece.count, piece.s.data());
    ToLogits(kernels_, From(params_.bias, first), options.logit_scale, options.softcap, piece.count,
             piece.s.data());
    ReadTeacher(r, first, piece.count, piece.t.data());
    function(piece);
  }
}

void SoftTargets::Summarise(SoftPass pass, int64_t r, SoftSums* sums) const {
  if (pass == SoftPass::kLogits) return FindLargest(r, sums);
  if (!soft_.rows[r].finite) return;
  return pass == SoftPass::kExponentials ? SumExponentials(r, sums) : SumDivergence(r, sums);
}

void SoftTargets::FindLargest(int64_t r, SoftSums* sums) const {
  *sums = SoftSums{};
  ForEachPiece(r, [&](const Piece& piece) {
    const float largest = kernels_.max_row(piece.s.data(), piece.count);
    const float teacher_largest = kernels_.max_row(piece.t.data(), piece.count);
    sums->finite = sums->finite && largest < kInfinity && teacher_largest < kInfinity;
    sums->largest = std::max(sums->largest, largest);
    sums->teacher_largest = std::max(sums->teacher_largest, teacher_largest);
    for (int64_t i = 0; i < piece.count; ++i) {
      if (!(piece.s[i] > kRuledOut)) continue;
      sums->most = std::max(sums->most, piece.s[i] - piece.t[i]);
      sums->least = std::min(sums->least, piece.s[i] - piece.t[i]);
    }
  });
}

void SoftTargets::SumExponentials(int64_t r, SoftSums* sums) const {
  const SoftRow& row = soft_.rows[r];
  ForEachPiece(r, [&](const Piece& piece) {
    Values exponentials;
    for (int64_t i = 0; i < piece.count; ++i) {
      exponentials[i] = (piece.t[i] - row.teacher_largest) * inverse_;
    }
    sums->teacher += kernels_.exp_row(exponentials.data(), piece.count, 0, 0);
    for (int64_t i = 0; i < piece.count; ++i) {
      exponentials[i] = (piece.s[i] - row.largest) * inverse_;
    }
    sums->student += kernels_.exp_row(exponentials.data(), piece.count, 0, 0);
    if (params_.distillation.divergence != Divergence::kReverseKl) return;
    for (int64_t i = 0; i < piece.count; ++i) {
      if (!(exponentials[i] > 0)) continue;
      sums->difference += static_cast<double>(exponentials[i]) * (piece.s[i] - piece.t[i]);
    }
  });
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

void SoftTargets::SumDivergence(int64_t r, SoftSums* sums) const {
  const Distillation& options = params_.distillation;
  const SoftRow& row = soft_.rows[r];
  const int64_t label = tile_.row_states[r].label;
  ForEachPiece(r, [&](const Piece& piece) {
    Values p;
    Values q;
    Values d;
    Values part;
    Values more;
    Probabilities(row, piece.s.data(), piece.t.data(), piece.count, p.data(), q.data());
    for (int64_t i = 0; i < piece.count; ++i) {
      d[i] = (piece.t[i] - piece.s[i]) * inverse_ - row.shift;
    }
    FillParts(options, p, q, d, piece.count, &part, &more);
    sums->parts += kernels_.sum_row(part.data(), nullptr, piece.count);
    if (options.divergence == Divergence::kJensenShannon) {
      sums->more_parts += kernels_.sum_row(more.data(), nullptr, piece.count);
    }
    const int64_t i = label - piece.first;
    if (i < 0 || i >= piece.count) return;
    sums->label = {p[i], q[i], d[i]};
    sums->label_difference = static_cast<double>(piece.s[i] - piece.t[i]) * inverse_;
  });
}

void SoftTargets::AddGradient(int64_t block, int64_t r, const float* logits, float* values) const {
  const SoftRow& row = soft_.rows[r];
  const int64_t begin = block * tile_.block_columns;
  const int64_t end = std::min(begin + tile_.block_columns, params_.vocab);
  for (int64_t first = begin; first < end; first += kPiece) {
    const int64_t count = std::min(kPiece, end - first);
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
