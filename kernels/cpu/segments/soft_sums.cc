#include "kernels/cpu/segments/soft_sums.h"

#include <algorithm>
#include <cmath>

#include "kernels/segment_tree.h"

namespace lossd::kernels::cpu {
namespace {

double SumOf(std::span<const SoftSums> segments, double SoftSums::*member) {
  PerSegment<double> values{};
  for (size_t i = 0; i < segments.size(); ++i) values[i] = segments[i].*member;
  return SumOverSegments(static_cast<int32_t>(segments.size()), values);
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

void MergeLogits(const Distillation& options, std::span<const SoftSums> segments, SoftRow* row) {
  SoftSums all;
  for (const SoftSums& segment : segments) {
    all.finite = all.finite && segment.finite;
    all.largest = std::max(all.largest, segment.largest);
    all.teacher_largest = std::max(all.teacher_largest, segment.teacher_largest);
    all.most = std::max(all.most, segment.most);
    all.least = std::min(all.least, segment.least);
  }
  const bool any = all.largest > -kInfinity && all.teacher_largest > -kInfinity;
  *row = SoftRow{.finite = all.finite && any, .largest = all.largest, .teacher_largest = all.teacher_largest};
  const float inverse = 1.0f / options.temperature;
  row->reach = ReachOf(options, static_cast<double>(all.most - all.least) * inverse);
}

void MergeExponentials(const Distillation& options, std::span<const SoftSums> segments, SoftRow* row) {
  const float inverse = 1.0f / options.temperature;
  const double student = SumOf(segments, &SoftSums::student);
  const double teacher = SumOf(segments, &SoftSums::teacher);
  row->student = static_cast<float>(1.0 / student);
  row->teacher = static_cast<float>(1.0 / teacher);
  row->shift = static_cast<float>((static_cast<double>(row->teacher_largest) - row->largest) * inverse +
                                  std::log(teacher) - std::log(student));
  row->mean = static_cast<float>(SumOf(segments, &SoftSums::difference) / student * inverse);
}

void MergeDivergence(const Distillation& options, std::span<const SoftSums> segments, int32_t owner,
                     SoftRow* row) {
  row->divergence = SumOf(segments, &SoftSums::parts);
  if (options.divergence == Divergence::kJensenShannon) {
    const auto beta = static_cast<double>(options.beta);
    const double more_parts = SumOf(segments, &SoftSums::more_parts);
    row->divergence = beta * row->divergence + (1 - beta) * more_parts;
    row->mean = static_cast<float>(more_parts);
  }
  const SoftSums& own = segments[static_cast<size_t>(owner)];
  row->label_slope = Slope<double>(options, own.label, own.label_difference, row->mean);
  row->finite = !std::isnan(row->divergence) && std::isfinite(row->reach);
}

}  // namespace

void MergeSoft(SoftPass pass, const Distillation& options, std::span<const SoftSums> segments, int32_t owner,
               SoftRow* row) {
  switch (pass) {
    case SoftPass::kLogits:
      return MergeLogits(options, segments, row);
    case SoftPass::kExponentials:
      return row->finite ? MergeExponentials(options, segments, row) : void();
    case SoftPass::kDivergence:
      return row->finite ? MergeDivergence(options, segments, owner, row) : void();
  }
}

}  // namespace lossd::kernels::cpu
