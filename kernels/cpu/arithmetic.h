// Which arithmetic the CPU step runs in.
#ifndef LOSSD_KERNELS_CPU_ARITHMETIC_H_
#define LOSSD_KERNELS_CPU_ARITHMETIC_H_

#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/logits.h"

namespace lossd::kernels::cpu {

enum class Arithmetic {
  kSimd,             // fp32, our own inner loops; weights of 16 bits are widened, which is exact
  kLibraryBFloat16,  // bf16 operands, fp32 sums, oneDNN; for processors with a bf16 matrix unit
  kLibraryFloat32,   // the same code with fp32 operands: runs everywhere, so that tests reach that code
};

// The fastest for a head on this processor.
Arithmetic BestArithmetic(DataType weight_type);

// What a tile keeps of its rows: only what plain cross-entropy needs, so that its tiles hold as many rows as
// can be, or what every option and return needs.
enum class RowRecord { kPlain, kFull };

// The step of linear_cross_entropy.h and its workspace, in an arithmetic of the caller's choice.
Status RunLinearCrossEntropy(const LinearCrossEntropyParams& params, Arithmetic arithmetic,
                             LinearCrossEntropyStats* stats);
// The same for the functions of logits.h.
Status RunLogits(const LogitsParams& params, Arithmetic arithmetic);
int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                       RowRecord record = RowRecord::kFull);
int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                   RowRecord record = RowRecord::kFull);
// With soft targets.
int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                       const TeacherSize& teacher);
int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                   const TeacherSize& teacher);

}  // namespace lossd::kernels::cpu

#endif  // LOSSD_KERNELS_CPU_ARITHMETIC_H_
