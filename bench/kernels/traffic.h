// What a part of the step costs by its algorithm: operations, and bytes that have to cross between memory and
// the chip. Each operand of a part counts once for every time the part needs the whole of it, as if caches
// held whatever is used again within one product; so GB/s made of these bytes is what the part must reach,
// not what it does. Arrays with one value a row are left out.
#ifndef LOSSD_BENCH_KERNELS_TRAFFIC_H_
#define LOSSD_BENCH_KERNELS_TRAFFIC_H_

#include <array>
#include <cstdint>
#include <string>

#include "kernels/data_type.h"

namespace lossd::bench {

struct Work {
  double operations = 0;  // of the matrix products; what is beside them is not counted
  double bytes = 0;

  Work& operator+=(const Work& other) {
    operations += other.operations;
    bytes += other.bytes;
    return *this;
  }
};

// The bare products: Z = X Wᵀ, dX = Z W and dW += Zᵀ X, where dW is read and written in fp32.
enum class Product { kLogits, kInputGradient, kWeightGradient };
inline constexpr std::array<Product, 3> kProducts = {Product::kLogits, Product::kInputGradient,
                                                     Product::kWeightGradient};
const char* ProductName(Product product);
// Operands are of `type`, Z and dX leave as `result`.
Work ProductWork(Product product, int64_t rows, int64_t vocab, int64_t hidden, kernels::DataType type,
                 kernels::DataType result);

// A fused step on a GPU, as kernels/cuda/linear_cross_entropy.h divides it.
struct StepShape {
  int64_t rows = 0;       // not ignored
  int64_t tile_rows = 0;  // worked on at once: W, and dW twice, cross once for each tile
  int64_t vocab = 0;
  int64_t hidden = 0;
  kernels::DataType type = kernels::DataType::kBFloat16;  // of W, X and dX
  // kExponentials: the logits product leaves E in W's type (Hopper). kLogits: it leaves fp32 logits, which
  // become E in a pass of their own.
  enum class Holds { kExponentials, kLogits } holds = Holds::kExponentials;
};

// The work of one stage, by the name that the step reports; nothing for a name that is not known.
Work StageWork(const std::string& stage, const StepShape& shape);
// The work of all stages of a step that gives losses, dX and dW +=.
Work StepWork(const StepShape& shape);
// The work of one that gives losses only: on Hopper E is not stored.
Work ForwardWork(const StepShape& shape);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_TRAFFIC_H_
