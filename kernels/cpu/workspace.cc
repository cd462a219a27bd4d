#include "kernels/cpu/workspace.h"

#include <unistd.h>

#include <algorithm>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/soft_tile.h"

namespace lossd::kernels {
namespace cpu {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kMaxThreads = 256;

// The machine's processors, not the caller's: the number of rows in a tile decides the order of additions
// into dW, which must not change with the number of threads a caller may use.
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

namespace {

// Sizes of everything, and the row states and hidden states that every tile has.
void PlaceRows(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, Layout& layout,
               Workspace& w) {
  w.rows = rows;
  w.padded_rows = RoundUp(rows, kRowAlignment);
  w.block_columns = arithmetic == Arithmetic::kSimd ? kBlock : kLibraryBlock;
  w.blocks = CeilDivide(vocab, w.block_columns);
  w.padded_hidden = RoundUp(hidden, kColumnAlignment);
  w.operand_type = arithmetic == Arithmetic::kLibraryBFloat16 ? DataType::kBFloat16 : DataType::kFloat32;
  w.threads = ScratchThreads();
  w.scratch_floats = ScratchFloats(arithmetic);
  w.x = layout.Take<char>(w.padded_rows, hidden, SizeOf(w.operand_type));
  w.row_states = layout.Take<RowState>(w.padded_rows, 1, 1);
}

void Place(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record,
           Layout& layout, Workspace& w) {
  PlaceRows(rows, vocab, hidden, arithmetic, layout, w);
  w.exponentials = layout.Take<char>(w.blocks, w.padded_rows, w.block_columns * SizeOf(w.operand_type));
  w.dx = layout.Take<float>(w.padded_rows, w.padded_hidden, 1);
  w.block_values = layout.Take<double>(w.blocks, w.padded_rows, 1);
  w.scratch = layout.Take<float>(w.threads, w.scratch_floats, 1);
  if (record == RowRecord::kFull) {
    w.block_details = layout.Take<BlockDetail>(w.blocks, w.padded_rows, 1);
    w.row_details = layout.Take<RowDetail>(w.padded_rows, 1, 1);
    w.top_logits = layout.Take<float>(w.padded_rows, kMostTopK, 1);
    w.top_tokens = layout.Take<int32_t>(w.padded_rows, kMostTopK, 1);
  }
}

// Far beyond any memory; keeps the paddings from overflowing.
bool IsSize(int64_t size) { return size <= int64_t{1} << 56; }

// The largest number of rows whose bytes(rows) are within `limit`.
template <class Bytes>
int64_t MostWithin(int64_t limit, const Bytes& bytes) {
  if (limit < bytes(1)) return 0;
  // A row takes at least 8 bytes.
  int64_t fits = 1;
  int64_t too_many = limit / 8 + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (bytes(middle) <= limit ? fits : too_many) = middle;
  }
  return fits;
}

}  // namespace

int64_t LayOut(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record,
               void* base, Workspace* workspace) {
  Layout layout(base);
  Place(rows, vocab, hidden, arithmetic, record, layout, *workspace);
  return layout.bytes();
}

int64_t LayOut(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, const TeacherSize& teacher,
               void* base, Workspace* workspace, SoftTile* soft) {
  Layout layout(base);
  Workspace& own = *workspace;
  Place(rows, vocab, hidden, arithmetic, RowRecord::kFull, layout, own);
  Workspace& of_teacher = soft->teacher;
  PlaceRows(rows, vocab, teacher.hidden, BestArithmetic(teacher.weight_type), layout, of_teacher);
  // Never at work at once.
  of_teacher.scratch = own.scratch;
  if (of_teacher.scratch_floats > own.scratch_floats) {
    of_teacher.scratch = layout.Take<float>(of_teacher.threads, of_teacher.scratch_floats, 1);
  }
  soft->teacher_logits =
      layout.Take<float>(of_teacher.blocks, of_teacher.padded_rows, of_teacher.block_columns);
  of_teacher.exponentials = soft->teacher_logits;  // where products in fp32 put them by themselves
  soft->logits = layout.Take<float>(own.blocks, own.padded_rows, own.block_columns);
  soft->rows = layout.Take<SoftRow>(own.padded_rows, 1, 1);
  return layout.bytes();
}

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record) {
  if (rows < 1 || vocab < 1 || hidden < 1) return 0;
  if (!IsSize(rows) || !IsSize(vocab) || !IsSize(hidden)) return INT64_MAX;
  Workspace workspace;
  return LayOut(rows, vocab, hidden, arithmetic, record, nullptr, &workspace);
}

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                       const TeacherSize& teacher) {
  if (rows < 1 || vocab < 1 || hidden < 1 || teacher.hidden < 1) return 0;
  if (!IsSize(rows) || !IsSize(vocab) || !IsSize(hidden) || !IsSize(teacher.hidden)) return INT64_MAX;
  Workspace workspace;
  SoftTile soft;
  return LayOut(rows, vocab, hidden, arithmetic, teacher, nullptr, &workspace, &soft);
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record) {
  if (vocab < 1 || hidden < 1) return 0;
  return MostWithin(bytes,
                    [=](int64_t rows) { return WorkspaceBytes(rows, vocab, hidden, arithmetic, record); });
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                   const TeacherSize& teacher) {
  if (vocab < 1 || hidden < 1 || teacher.hidden < 1) return 0;
  return MostWithin(bytes,
                    [&](int64_t rows) { return WorkspaceBytes(rows, vocab, hidden, arithmetic, teacher); });
}

}  // namespace cpu

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, DataType weight_type) {
  return cpu::WorkspaceBytes(rows, vocab, hidden, cpu::BestArithmetic(weight_type));
}

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, DataType weight_type,
                       const TeacherSize& teacher) {
  return cpu::WorkspaceBytes(rows, vocab, hidden, cpu::BestArithmetic(weight_type), teacher);
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, DataType weight_type) {
  return cpu::RowsWithin(bytes, vocab, hidden, cpu::BestArithmetic(weight_type));
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, DataType weight_type,
                   const TeacherSize& teacher) {
  return cpu::RowsWithin(bytes, vocab, hidden, cpu::BestArithmetic(weight_type), teacher);
}

}  // namespace lossd::kernels
