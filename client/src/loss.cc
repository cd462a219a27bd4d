#include "lossd/loss.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/src/common/data_type.h"

namespace lossd {

int64_t CountValid(std::span<const int64_t> labels, int64_t ignore_index) {
  return static_cast<int64_t>(labels.size()) - std::count(labels.begin(), labels.end(), ignore_index);
}

double ClassWeightSum(std::span<const int64_t> labels, std::span<const float> class_weights,
                      int64_t ignore_index) {
  double sum = 0;
  for (const int64_t label : labels) {
    if (label != ignore_index) sum += class_weights[static_cast<size_t>(label)];
  }
  return sum;
}

void ScaleInPlace(DataType type, void* values, int64_t count, double scale) {
  constexpr int64_t kBlock = 1024;
  float wide[kBlock];
  auto* bytes = static_cast<unsigned char*>(values);
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t size = std::min(kBlock, count - done);
    unsigned char* const block = bytes + done * SizeOf(type);
    internal::ConvertElements(type, block, DataType::kFloat32, wide, size);
    for (float& value : std::span(wide, static_cast<size_t>(size))) {
      value = static_cast<float>(value * scale);
    }
    internal::ConvertElements(DataType::kFloat32, wide, type, block, size);
  }
}

absl::StatusOr<std::vector<int64_t>> ShiftedLabels(std::span<const int64_t> labels, int64_t shift,
                                                   int64_t sequence_length, int64_t ignore_index) {
  const auto tokens = static_cast<int64_t>(labels.size());
  if (shift < 0) {
    return absl::InvalidArgumentError(absl::StrCat("shift is ", shift, "; it must be at least 0"));
  }
  if (sequence_length < 1 || tokens % sequence_length != 0) {
    return absl::InvalidArgumentError(absl::StrCat("sequence_length is ", sequence_length,
                                                   "; it must be at least 1 and divide the ", tokens,
                                                   " tokens of labels"));
  }
  std::vector<int64_t> shifted(labels.size(), ignore_index);
  const int64_t kept = std::max<int64_t>(0, sequence_length - shift);
  for (int64_t first = 0; first < tokens && kept > 0; first += sequence_length) {
    std::copy_n(labels.begin() + first + shift, kept, shifted.begin() + first);
  }
  return shifted;
}

}  // namespace lossd
