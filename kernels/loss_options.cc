#include "kernels/loss_options.h"

#include <cmath>

namespace lossd::kernels {

bool IsIn(LossRange range, float value) {
  if (!std::isfinite(value)) return false;
  switch (range) {
    case LossRange::kAboveZero:
      return value > 0;
    case LossRange::kAboveZeroOrNone:
    case LossRange::kAtLeastZero:
      return value >= 0;
    case LossRange::kShare:
      return value >= 0 && value <= 1;
  }
  return false;
}

const char* Name(LossRange range) {
  switch (range) {
    case LossRange::kAboveZero:
      return "finite and above 0";
    case LossRange::kAboveZeroOrNone:
      return "finite and above 0, or 0 for none";
    case LossRange::kAtLeastZero:
      return "finite and at least 0";
    case LossRange::kShare:
      return "in [0, 1]";
  }
  return "";
}

}  // namespace lossd::kernels
