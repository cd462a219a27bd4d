// What each segment of the vocabulary finds out of a row, and what all of them do together.
#ifndef LOSSD_KERNELS_CPU_SEGMENTS_ROW_SUMS_H_
#define LOSSD_KERNELS_CPU_SEGMENTS_ROW_SUMS_H_

#include <cstdint>
#include <limits>
#include <span>

namespace lossd::kernels::cpu {

// In what exponentials are counted: e^offset 2^exponent.
struct Units {
  float offset = 0;
  int32_t exponent = 0;

  bool operator==(const Units&) const = default;
};

// `value` counted in other units: exact where offsets are the same, otherwise within a few ulp; 0 and
// infinite where it leaves the range of double.
double InUnits(double value, const Units& from, const Units& to);

// A row in one segment. It goes between ranks as it lies in memory.
struct RowSums {
  double sum = 0;              // over the segment's E, with the label's; 0 where there are no entries
  double weighted_logits = 0;  // label smoothing: sum of C s
  double moment = 0;           // the entropy and its gradient: sum of E (s - largest)
  Units units;                 // of sum, moment and target_exponential
  float largest = -std::numeric_limits<float>::infinity();  // the same: s
  int32_t above = 0;                                        // logits above the label's
  bool overflowed = false;
  bool redone = false;  // its offset was out of range
  // Where the label is one of the segment's entries.
  float target_logit = 0;
  float target_exponential = 0;
  float label_factor = 1;
};

// A row in all of them.
struct RowTotals {
  Units units;  // those of the segment with the largest part of the sum
  double sum = 0;
  double smallest_sum = 0;  // the same in each segment's units: the least of them
  double weighted_logits = 0;
  double moment = 0;
  float largest = 0;
  int32_t above = 0;
  bool overflowed = false;
  bool redone = false;
  float target_logit = 0;
  double target_exponential = 0;
  float label_factor = 1;
};

// Every rank merges the same records and so gets the same bits. `owner` is the segment that has the label.
RowTotals Merge(std::span<const RowSums> segments, int32_t owner);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SEGMENTS_ROW_SUMS_H_
