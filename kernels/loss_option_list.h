// Every option of LossOptions, listed once: for checks, and for what is written down of them. Code of the
// device needs none of it.
#ifndef LOSSD_KERNELS_LOSS_OPTION_LIST_H_
#define LOSSD_KERNELS_LOSS_OPTION_LIST_H_

#include "kernels/linear_cross_entropy.h"

namespace lossd::kernels {

// The values that an option may have; all of them are finite.
enum class LossRange { kAboveZero, kAboveZeroOrNone, kAtLeastZero, kShare };  // kShare: [0, 1]
bool IsIn(LossRange range, float value);
const char* Name(LossRange range);  // "finite and above 0"

struct LossOption {
  const char* name;
  float LossOptions::*value;
  LossRange range;
};
inline constexpr LossOption kLossOptions[] = {
    {"logit_scale", &LossOptions::logit_scale, LossRange::kAboveZero},
    {"softcap", &LossOptions::softcap, LossRange::kAboveZeroOrNone},
    {"label_smoothing", &LossOptions::label_smoothing, LossRange::kShare},
    {"lse_square_scale", &LossOptions::lse_square_scale, LossRange::kAtLeastZero},
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_LOSS_OPTION_LIST_H_
