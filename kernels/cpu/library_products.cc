#include "kernels/cpu/library_products.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/gemm.h"

namespace lossd::kernels::cpu {
namespace {

// What makes the library's bits for a row change with the number of rows beside it: one row alone is another
// algorithm, and longer sums than this are split by the number of rows. (oneDNN 2.6 on AMX; the tests of rows
// compare bits.)
constexpr int64_t kFewestRows = 2;
constexpr int64_t kDepth = 1024;

}  // namespace

// Rows to multiply so that at least kFewestRows are. A range with fewer is the tile's last, and what comes
// after it is padding, whose results nobody reads.
int64_t LibraryProducts::RowsToMultiply(Range rows) const {
  const int64_t count = std::min(rows.end, tile_.rows) - rows.begin;
  return count <= 0 ? 0 : std::max(count, kFewestRows);
}

char* LibraryProducts::Exponentials(int64_t block, int64_t row) const {
  return static_cast<char*>(tile_.exponentials) +
         tile_.ExponentialsIndex(block, row) * SizeOf(tile_.operand_type);
}

char* LibraryProducts::Row(void* matrix, int64_t row) const {
  return static_cast<char*>(matrix) + row * weight_.hidden * SizeOf(tile_.operand_type);
}

void LibraryProducts::PackRows(int64_t row, int64_t count, int64_t column, int64_t depth, const float* x,
                               int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    char* to = Row(tile_.x, row + i) + column * SizeOf(tile_.operand_type);
    Convert(DataType::kFloat32, x + i * stride, tile_.operand_type, to, depth);
  }
}

void LibraryProducts::UnpackRow(int64_t row, int64_t column, int64_t count, float* x) const {
  const char* from = Row(tile_.x, row) + column * SizeOf(tile_.operand_type);
  Convert(tile_.operand_type, from, DataType::kFloat32, x, count);
}

float* LibraryProducts::MultiplyLogits(int64_t block, Range rows, float* scratch) {
  const int64_t first = block * tile_.block_columns;
  const int64_t columns = std::min(tile_.block_columns, weight_.vocab - first);
  const int64_t count = RowsToMultiply(rows);
  if (count == 0) return scratch;
  for (int64_t column = 0; column < weight_.hidden; column += kDepth) {
    const char* row = Row(tile_.x, rows.begin) + column * SizeOf(tile_.operand_type);
    const Operand x{row, weight_.hidden, 1};
    const Operand weight_transposed{weight_.At(first, column), 1, weight_.hidden};
    if (!Multiply(tile_.operand_type, count, columns, std::min(kDepth, weight_.hidden - column), x,
                  weight_transposed, scratch, tile_.block_columns,
                  column == 0 ? Store::kOverwrite : Store::kAdd)) {
      return nullptr;
    }
  }
  return scratch;
}

void LibraryProducts::StoreExponentials(int64_t block, Range rows, const float* exponentials) {
  const int64_t count = std::min(rows.end, tile_.rows) - rows.begin;
  if (count <= 0) return;
  Convert(DataType::kFloat32, exponentials, tile_.operand_type, Exponentials(block, rows.begin),
          count * tile_.block_columns);
}

void LibraryProducts::ZeroExponentials(int64_t row) {
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    std::memset(Exponentials(block, row), 0,
                static_cast<size_t>(tile_.block_columns * SizeOf(tile_.operand_type)));
  }
}

float* LibraryProducts::StoredExponentials(int64_t /*block*/, Range /*rows*/) { return nullptr; }

const float* LibraryProducts::ReadExponentials(int64_t block, int64_t row, float* scratch) const {
  Convert(tile_.operand_type, Exponentials(block, row), DataType::kFloat32, scratch, tile_.block_columns);
  return scratch;
}

// The whole block, so that the product is the library's same one; an even row, so that the row beside it is
// at worst padding.
bool LibraryProducts::MultiplyLogit(int64_t row, int64_t entry, float* scratch, float* logit) {
  const int64_t first = row - row % kFewestRows;
  const int64_t block = entry / tile_.block_columns;
  if (MultiplyLogits(block, {first, first + kFewestRows}, scratch) == nullptr) return false;
  *logit = scratch[(row - first) * tile_.block_columns + entry - block * tile_.block_columns];
  return true;
}

bool LibraryProducts::MultiplyInputGradient(Range rows, Range columns, float* /*scratch*/) {
  const int64_t count = RowsToMultiply(rows);
  if (count == 0) return true;
  float* dx = tile_.dx + rows.begin * tile_.padded_hidden + columns.begin;
  for (int64_t block = 0; block < tile_.blocks; ++block) {
    const int64_t first = block * tile_.block_columns;
    const Operand exponentials{Exponentials(block, rows.begin), tile_.block_columns, 1};
    const Operand weight{weight_.At(first, columns.begin), weight_.hidden, 1};
    if (!Multiply(tile_.operand_type, count, columns.end - columns.begin,
                  std::min(tile_.block_columns, weight_.vocab - first), exponentials, weight, dx,
                  tile_.padded_hidden, block == 0 ? Store::kOverwrite : Store::kAdd)) {
      return false;
    }
  }
  return true;
}

void LibraryProducts::PackScaledRows(int64_t row_block, float* scratch) {
  const int64_t end = std::min((row_block + 1) * kBlock, tile_.rows);
  for (int64_t r = row_block * kBlock; r < end; ++r) {
    const float scale = tile_.row_states[r].scale;
    for (int64_t column = 0; column < weight_.hidden; column += kBlock) {
      const int64_t count = std::min(kBlock, weight_.hidden - column);
      UnpackRow(r, column, count, scratch);
      // X of a row that overflowed may itself be infinite in the weight's type.
      const bool overflowed = tile_.row_states[r].overflowed;
      for (int64_t i = 0; i < count; ++i) scratch[i] = overflowed ? 0.0f : scratch[i] * scale;
      Convert(DataType::kFloat32, scratch, tile_.operand_type,
              Row(tile_.dx, r) + column * SizeOf(tile_.operand_type), count);
    }
  }
}

bool LibraryProducts::MultiplyWeightGradient(int64_t block, Range columns, Store store, float* dw,
                                             float* /*scratch*/) {
  const int64_t first = block * tile_.block_columns;
  const Operand exponentials_transposed{Exponentials(block, 0), 1, tile_.block_columns};
  const Operand scaled_rows{Row(tile_.dx, 0) + columns.begin * SizeOf(tile_.operand_type), weight_.hidden, 1};
  return Multiply(tile_.operand_type, std::min(tile_.block_columns, weight_.vocab - first),
                  columns.end - columns.begin, tile_.rows, exponentials_transposed, scaled_rows,
                  dw + first * weight_.hidden + columns.begin, weight_.hidden, store);
}

}  // namespace lossd::kernels::cpu
