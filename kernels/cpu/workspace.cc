#include "kernels/cpu/workspace.h"

#include <unistd.h>

#include <algorithm>

#include "kernels/cpu/arithmetic.h"

namespace lossd::kernels {
namespace cpu {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kMaxThreads = 256;

// Of the machine, not of the caller: the number of rows in a tile decides the order of additions into dW,
// which must not change with the number of threads a caller may use.
int64_t ScratchThreads() { return std::clamp<int64_t>(sysconf(_SC_NPROCESSORS_CONF), 1, kMaxThreads); }

class Layout {
 public:
  explicit Layout(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* Take(int64_t a, int64_t b, int64_t c) {
    int64_t count = 0;
    int64_t bytes = 0;
    overflow_ |= __builtin_mul_overflow(a, b, &count) || __builtin_mul_overflow(count, c, &count) ||
                 __builtin_mul_overflow(count, static_cast<int64_t>(sizeof(T)), &bytes) ||
                 bytes > INT64_MAX - kAlignment;
    const int64_t offset = bytes_;
    overflow_ |= !overflow_ && __builtin_add_overflow(bytes_, RoundUp(bytes, kAlignment), &bytes_);
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }

  int64_t bytes() const { return overflow_ ? INT64_MAX : bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
  bool overflow_ = false;
};

// Floats of one thread's scratch.
int64_t ScratchFloats(Arithmetic arithmetic) {
  // One packed operand of kBlock x kBlock, with room for the last panel's padding; or a tile of logits.
  return arithmetic == Arithmetic::kSimd ? kBlock * (kBlock + kColumnAlignment)
                                         : kLibraryBlock * kLibraryRows;
}

}  // namespace

int64_t LayOut(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record,
               void* base, Workspace* workspace) {
  Layout layout(base);
  Workspace& w = *workspace;
  w.rows = rows;
  w.padded_rows = RoundUp(rows, kRowAlignment);
  w.block_columns = arithmetic == Arithmetic::kSimd ? kBlock : kLibraryBlock;
  w.blocks = CeilDivide(vocab, w.block_columns);
  w.padded_hidden = RoundUp(hidden, kColumnAlignment);
  w.operand_type = arithmetic == Arithmetic::kLibraryBFloat16 ? DataType::kBFloat16 : DataType::kFloat32;
  w.threads = ScratchThreads();
  w.scratch_floats = ScratchFloats(arithmetic);
  const int64_t operand_bytes = SizeOf(w.operand_type);
  w.exponentials = layout.Take<char>(w.blocks, w.padded_rows, w.block_columns * operand_bytes);
  w.x = layout.Take<char>(w.padded_rows, hidden, operand_bytes);
  w.dx = layout.Take<float>(w.padded_rows, w.padded_hidden, 1);
  w.block_values = layout.Take<double>(w.blocks, w.padded_rows, 1);
  w.row_states = layout.Take<RowState>(w.padded_rows, 1, 1);
  w.scratch = layout.Take<float>(w.threads, w.scratch_floats, 1);
  if (record == RowRecord::kFull) {
    w.block_details = layout.Take<BlockDetail>(w.blocks, w.padded_rows, 1);
    w.row_details = layout.Take<RowDetail>(w.padded_rows, 1, 1);
    w.top_logits = layout.Take<float>(w.padded_rows, kMostTopK, 1);
    w.top_tokens = layout.Take<int32_t>(w.padded_rows, kMostTopK, 1);
  }
  return layout.bytes();
}

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record) {
  if (rows < 1 || vocab < 1 || hidden < 1) return 0;
  // Far beyond any memory; keeps the paddings from overflowing.
  constexpr int64_t kLargest = int64_t{1} << 56;
  if (rows > kLargest || vocab > kLargest || hidden > kLargest) return INT64_MAX;
  Workspace workspace;
  return LayOut(rows, vocab, hidden, arithmetic, record, nullptr, &workspace);
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record) {
  if (vocab < 1 || hidden < 1 || bytes < WorkspaceBytes(1, vocab, hidden, arithmetic, record)) return 0;
  // A row takes at least 8 bytes.
  int64_t fits = 1;
  int64_t too_many = bytes / 8 + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (WorkspaceBytes(middle, vocab, hidden, arithmetic, record) <= bytes ? fits : too_many) = middle;
  }
  return fits;
}

}  // namespace cpu

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, DataType weight_type) {
  return cpu::WorkspaceBytes(rows, vocab, hidden, cpu::BestArithmetic(weight_type));
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, DataType weight_type) {
  return cpu::RowsWithin(bytes, vocab, hidden, cpu::BestArithmetic(weight_type));
}

}  // namespace lossd::kernels
