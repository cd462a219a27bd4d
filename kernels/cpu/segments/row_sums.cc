#include "kernels/cpu/segments/row_sums.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/constants.h"
#include "kernels/segment_tree.h"

namespace lossd::kernels::cpu {
namespace {

constexpr double kLn2Rest = 2.319046813846299558e-17;  // what kLn2 lacks of ln 2
// Beyond e to this every double is 0 or infinite, whatever it is multiplied by.
constexpr double kFar = 2000;

// The segment with the largest part of the row's sum: in its units no part is out of range.
const RowSums& Reference(std::span<const RowSums> segments) {
  const RowSums* reference = segments.data();
  double largest = -std::numeric_limits<double>::infinity();
  for (const RowSums& segment : segments) {
    if (!(segment.sum > 0)) continue;
    const double log_sum = std::log(segment.sum) + segment.units.exponent * kLn2 + segment.units.offset;
    if (log_sum <= largest) continue;
    largest = log_sum;
    reference = &segment;
  }
  return *reference;
}

void MergeMoments(std::span<const RowSums> segments, RowTotals& totals) {
  totals.largest = segments[0].largest;
  for (const RowSums& segment : segments) totals.largest = std::max(totals.largest, segment.largest);
  PerSegment<double> moments{};
  for (size_t i = 0; i < segments.size(); ++i) {
    const RowSums& segment = segments[i];
    if (!(segment.sum > 0)) continue;
    const double distance = static_cast<double>(totals.largest) - segment.largest;
    const double moment = segment.moment - (distance == 0 ? 0.0 : distance * segment.sum);
    moments[i] = InUnits(moment, segment.units, totals.units);
  }
  totals.moment = SumOverSegments(static_cast<int32_t>(segments.size()), moments);
}

}  // namespace

double InUnits(double value, const Units& from, const Units& to) {
  if (value == 0) return 0;
  const double exponent = static_cast<double>(from.exponent) - to.exponent;
  if (from.offset == to.offset) return std::scalbn(value, static_cast<int>(exponent));
  const double distance = static_cast<double>(from.offset) - to.offset;
  const double log_factor = distance + exponent * kLn2;
  if (log_factor > kFar) return std::copysign(std::numeric_limits<double>::infinity(), value);
  if (log_factor < -kFar) return 0;
  // As 2^n e^rest, so that neither an offset nor an exponent alone leaves the range.
  const double n = std::nearbyint(distance / kLn2);
  const double rest = std::fma(-n, kLn2Rest, std::fma(-n, kLn2, distance));
  return std::scalbn(value * std::exp(rest), static_cast<int>(n + exponent));
}

RowTotals Merge(std::span<const RowSums> segments, int32_t owner) {
  const auto count = static_cast<int32_t>(segments.size());
  RowTotals totals;
  for (const RowSums& segment : segments) {
    totals.overflowed = totals.overflowed || segment.overflowed;
    totals.redone = totals.redone || segment.redone;
    totals.above += segment.above;
  }
  if (totals.overflowed) return totals;
  totals.units = Reference(segments).units;
  PerSegment<double> sums{};
  PerSegment<double> weighted_logits{};
  for (size_t i = 0; i < segments.size(); ++i) {
    sums[i] = InUnits(segments[i].sum, segments[i].units, totals.units);
    weighted_logits[i] = segments[i].weighted_logits;
  }
  totals.sum = SumOverSegments(count, sums);
  totals.weighted_logits = SumOverSegments(count, weighted_logits);
  totals.smallest_sum = totals.sum;
  for (const RowSums& segment : segments) {
    if (!(segment.sum > 0)) continue;
    totals.smallest_sum = std::min(totals.smallest_sum, InUnits(totals.sum, totals.units, segment.units));
  }
  MergeMoments(segments, totals);
  const RowSums& own = segments[static_cast<size_t>(owner)];
  totals.target_logit = own.target_logit;
  totals.target_exponential = InUnits(own.target_exponential, own.units, totals.units);
  totals.label_factor = own.label_factor;
  return totals;
}

}  // namespace lossd::kernels::cpu
