// Products through oneDNN, operands in bf16 (or fp32, see arithmetic.h), sums in fp32.
//
// The library is called from inside the step's parallel loops, so each product runs on one thread and never
// splits a reduction between threads.
#ifndef LOSSD_KERNELS_CPU_LIBRARY_PRODUCTS_H_
#define LOSSD_KERNELS_CPU_LIBRARY_PRODUCTS_H_

#include "kernels/cpu/products.h"

namespace lossd::kernels::cpu {

class LibraryProducts final : public Products {
 public:
  using Products::Products;

  int64_t rows_per_panel() const override { return 1; }
  int64_t logit_rows() const override { return kLibraryRows; }
  void PackRows(int64_t row, int64_t count, int64_t column, int64_t depth, const float* x,
                int64_t stride) override;
  void UnpackRow(int64_t row, int64_t column, int64_t count, float* x) const override;
  float* MultiplyLogits(int64_t block, Range rows, float* scratch) override;
  void StoreExponentials(int64_t block, Range rows, const float* exponentials) override;
  void ZeroExponentials(int64_t row) override;
  float* StoredExponentials(int64_t block, Range rows) override;
  const float* ReadExponentials(int64_t block, int64_t row, float* scratch) const override;
  bool MultiplyLogit(int64_t row, int64_t entry, float* scratch, float* logit) override;
  bool MultiplyInputGradient(Range rows, Range columns, float* scratch) override;
  void PackScaledRows(int64_t row_block, float* scratch) override;
  bool MultiplyWeightGradient(int64_t block, Range columns, Store store, float* dw, float* scratch) override;

 private:
  int64_t RowsToMultiply(Range rows) const;
  char* Exponentials(int64_t block, int64_t row) const;
  char* Row(void* matrix, int64_t row) const;  // of X, or of v X
};

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_LIBRARY_PRODUCTS_H_
