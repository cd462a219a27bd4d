// The inner loops of the CPU step, one implementation per instruction set, picked at run time.
//
// Every result of one matrix element, exponential or maximum is computed by a fixed sequence of operations
// that depends on nothing but that element's own inputs: not on its place in a tile, nor on what lies beside
// it. That is what makes a row's loss and dX the same in every batch.
#ifndef LOSSD_KERNELS_CPU_SIMD_KERNELS_H_
#define LOSSD_KERNELS_CPU_SIMD_KERNELS_H_

#include <cstdint>

#include "kernels/data_type.h"

namespace lossd::kernels::cpu {

// What a product does to its output tile.
enum class Store { kOverwrite, kAdd };

// The factors of spread_row, which are all of a row.
struct SpreadTerms {
  float slope = 0;
  float spread = 0;
  float largest = 0;
  float mean = 0;
};

// Matrix products work on panels: `tile_rows` rows of the left operand, or `tile_columns` columns of the
// right one, stored so that the values of one step of the reduction are adjacent: panel[k * width + i].
struct SimdKernels {
  const char* name;
  int64_t tile_rows;     // divides kRowAlignment
  int64_t tile_columns;  // divides kBlock

  // c[tile_rows, tile_columns] (row stride c_stride) = or += a b over `depth` steps; both operands panels.
  void (*multiply_panels)(int64_t depth, const float* a, const float* b, float* c, int64_t c_stride,
                          Store store);
  // The same with a plain row-major left operand [tile_rows, depth] (row stride a_stride).
  void (*multiply_rows)(int64_t depth, const float* a, int64_t a_stride, const float* b, float* c,
                        int64_t c_stride, Store store);

  // Packs the transpose of a row-major [columns, depth] matrix (row stride in elements; of any type,
  // widened) into one panel of `width` columns; columns that are missing (columns < width) become zero.
  void (*pack_transposed)(DataType type, const void* from, int64_t stride, int64_t columns, int64_t depth,
                          int64_t width, float* panel);
  // Packs a row-major [depth, columns] matrix into one panel of `width` columns, missing columns zero.
  void (*pack)(DataType type, const void* from, int64_t stride, int64_t depth, int64_t columns, int64_t width,
               float* panel);

  // values[i] = e^(values[i] - offset) * 2^-exponent, 0 where that is below 2^-110, infinite where it is
  // above 2^128 or the input is NaN. Returns the sum, in double.
  double (*exp_row)(float* values, int64_t count, float offset, int32_t exponent);
  // The largest value; NaN if any value is NaN. count >= 1.
  float (*max_row)(const float* values, int64_t count);

  // values[i] = cap tanh(values[i] / cap) within 4 ulp, and factors[i] its derivative, which keeps its digits
  // down to 2^-106. NaN where the value is not finite.
  void (*cap_row)(float* values, float* factors, int64_t count, float cap);
  // Sum of values[i] weights[i] in double; weights null: of values[i].
  double (*sum_row)(const float* values, const float* weights, int64_t count);
  // Sum of exponentials[i] (values[i] - largest) in double. Where the exponential is 0 the term is.
  double (*moment_row)(const float* exponentials, const float* values, int64_t count, float largest);
  // exponentials[i] *= slope - spread (values[i] - largest - mean). What is 0 stays so, whatever the value
  // is.
  void (*spread_row)(float* exponentials, const float* values, int64_t count, const SpreadTerms& terms);
  // values[i] = (slope values[i] - level weights[i]) factors[i]; weights and factors may be null: 1.
  void (*gradient_row)(float* values, const float* weights, const float* factors, int64_t count, float slope,
                       float level);
};

// Vocabulary entries worked on at once, and steps of a reduction that are summed before they are added to the
// result.
inline constexpr int64_t kBlock = 256;
// Rows of a tile are padded to a multiple of this.
inline constexpr int64_t kRowAlignment = 12;

// The fastest implementation this processor can run.
const SimdKernels& BestSimdKernels();

// Every implementation this processor can run, for tests; the last entry is followed by nullptr.
const SimdKernels* const* RunnableSimdKernels();

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_SIMD_KERNELS_H_
