#include "client/examples/train_lm/arithmetic.h"

namespace lossd::train_lm {

const Arithmetic& BaselineArithmetic();
const Arithmetic& Avx2Arithmetic();

const Arithmetic& BestArithmetic() {
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  return avx2 ? Avx2Arithmetic() : BaselineArithmetic();
}

}  // namespace lossd::train_lm
