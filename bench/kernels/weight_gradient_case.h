// What adding a chunk's part to dW costs: the speed of the adding product, and the memory it takes.
#ifndef LOSSD_BENCH_KERNELS_WEIGHT_GRADIENT_CASE_H_
#define LOSSD_BENCH_KERNELS_WEIGHT_GRADIENT_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bench/kernels/kernel_case.h"
#include "kernels/data_type.h"

namespace lossd::bench {

struct WeightGradientCase {
  int64_t vocab = 0;
  int64_t hidden = 0;
  std::vector<int64_t> rows;  // of a chunk, each of them a measurement
  int64_t batch = 0;          // rows of the bare product; as many go into dW in each measurement, in chunks
  int64_t memory_rows = 0;    // of the chunk whose memory is measured
  kernels::DataType dtype = kernels::DataType::kBFloat16;
  int64_t repetitions = 0;
  int cuda_index = 0;
};

struct ChunkSpeed {
  int64_t rows = 0;
  Measurement ours;     // the step's own product, dW +=
  Measurement library;  // cuBLAS, dW +=
  // Median over the rounds of the bare product's time over these: 1 is its speed.
  double ours_speed = 0;
  double library_speed = 0;
};

// Bytes that a fused step over one chunk of memory_rows rows takes.
struct ChunkMemory {
  int64_t product_taken = 0;  // that the adding product alone takes from the device
  int64_t step_taken = 0;     // that the whole step takes above inputs and outputs, E included
  int64_t e = 0;              // [memory_rows, V] in 16 bits
  int64_t x = 0;
  int64_t dx = 0;
  int64_t weight = 0;
  int64_t gradient = 0;
};

struct WeightGradientResult {
  std::string error;    // empty, or why something is missing
  double dw_error = 0;  // relative, of sampled rows of dW after a batch was added chunk by chunk; the worst
  Measurement bare;     // cuBLAS, dW overwritten, the whole batch at once
  std::vector<ChunkSpeed> chunks;
  ChunkMemory memory;
  std::string hardware;
};

// On a device of compute capability 9.0.
WeightGradientResult RunWeightGradientCase(const WeightGradientCase& weight_gradient_case,
                                           const Progress& progress);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_WEIGHT_GRADIENT_CASE_H_
