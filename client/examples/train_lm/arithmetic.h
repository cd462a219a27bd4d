// The single-threaded inner loops, built once for every x86-64 machine and once with AVX2 and FMA; the faster
// one that this machine can run is chosen at run time, so the program may be built on one machine and run on
// another. All matrices are fp32, row-major, dense.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_ARITHMETIC_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_ARITHMETIC_H_

#include <cstdint>

namespace lossd::train_lm {

struct AdamCoefficients {
  float step_size = 0;  // learning rate over the first moment's bias correction
  float decay = 0;      // what a weight loses before its step: learning rate times weight decay
  float beta1 = 0;
  float beta2 = 0;
  float root_correction = 0;  // 1 / sqrt(second moment's bias correction)
  float epsilon = 0;
};

struct Arithmetic {
  const char* name;

  // out [m, n] = a [m, k] · b [k, n]
  void (*product)(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k);
  // out [m, n] = a [m, k] · b [n, k]ᵀ
  void (*product_bt)(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k);
  // out [m, n] += a[:, columns]ᵀ · b [k, n], where a is [k, a_columns] and `columns` are the m from
  // first_column onward.
  void (*accumulate_at)(const float* a, int64_t a_columns, int64_t first_column, const float* b, float* out,
                        int64_t m, int64_t n, int64_t k);

  // Turns one row of logits into probabilities and returns -log p[label] (in fp64 from the row's maximum on).
  double (*softmax)(float* row, int64_t vocabulary, int64_t label);

  // One AdamW update of n parameters.
  void (*adam)(const AdamCoefficients& c, const float* gradient, float* first, float* second,
               float* parameters, int64_t n);
};

const Arithmetic& BestArithmetic();

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_ARITHMETIC_H_
