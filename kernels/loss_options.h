// The options of a loss, and the list of them that checks, messages and checkpoints go over.
#ifndef LOSSD_KERNELS_LOSS_OPTIONS_H_
#define LOSSD_KERNELS_LOSS_OPTIONS_H_

namespace lossd::kernels {

// What a row's loss is beyond plain cross-entropy. Notation and formulas: docs/numerics.md.
struct LossOptions {
  float logit_scale = 1.0f;       // τ, finite and above 0
  float softcap = 0.0f;           // c, finite and above 0; 0: none
  float label_smoothing = 0.0f;   // ε, in [0, 1]
  float lse_square_scale = 0.0f;  // λ of the z-loss λ ℓ², finite and at least 0

  bool operator==(const LossOptions&) const = default;
};

// The values that an option may have; all of them are finite.
enum class LossRange { kAboveZero, kAboveZeroOrNone, kAtLeastZero, kShare };  // kShare: [0, 1]
bool IsIn(LossRange range, float value);
const char* Name(LossRange range);  // "finite and above 0"

using LossValue = float LossOptions::*;
struct LossOption {
  const char* name;  // that of the field of lossd.v1.LossOptions too
  LossValue value;
  LossRange range;
};
inline constexpr LossOption kLossOptions[] = {
    {"logit_scale", &LossOptions::logit_scale, LossRange::kAboveZero},
    {"softcap", &LossOptions::softcap, LossRange::kAboveZeroOrNone},
    {"label_smoothing", &LossOptions::label_smoothing, LossRange::kShare},
    {"lse_square_scale", &LossOptions::lse_square_scale, LossRange::kAtLeastZero},
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_LOSS_OPTIONS_H_
