#include "kernels/cpu/tile_memory.h"

#include <unistd.h>

#include <algorithm>

#include "kernels/cpu/segments/vocabulary.h"
#include "kernels/rounding.h"

namespace lossd::kernels {
namespace cpu {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kMaxThreads = 256;

// The machine's processors, not the caller's: the number of rows in a tile decides the order of additions
// into dW, which must not change with the number of threads a caller may use.
// Asked once, because the C library opens a file of /sys for the answer and every batch plans its tiles.
int64_t Processors() {
  static const int64_t processors = std::clamp<int64_t>(sysconf(_SC_NPROCESSORS_CONF), 1, kMaxThreads);
  return processors;
}

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

// Sizes of a segment's part. It shares hidden states, scratch and, between both heads, row states.
void SetSizes(const TileSize& size, int64_t hidden, Arithmetic arithmetic, int64_t entries, Workspace& w) {
  w.rows = size.rows;
  w.padded_rows = RoundUp(size.rows, kRowAlignment);
  w.block_columns = arithmetic == Arithmetic::kSimd ? kBlock : kLibraryBlock;
  w.blocks = CeilDivide(entries, w.block_columns);
  w.padded_hidden = RoundUp(hidden, kColumnAlignment);
  w.operand_type = arithmetic == Arithmetic::kLibraryBFloat16 ? DataType::kBFloat16 : DataType::kFloat32;
  w.threads = size.threads;
  w.scratch_floats = ScratchFloats(arithmetic);
}

void PlaceSegment(const TileSize& size, Layout& layout, Workspace& w) {
  w.row_states = layout.Take<RowState>(w.padded_rows, 1, 1);
  w.exponentials = layout.Take<char>(w.blocks, w.padded_rows, w.block_columns * SizeOf(w.operand_type));
  w.dx = layout.Take<float>(w.padded_rows, w.padded_hidden, 1);
  w.block_values = layout.Take<double>(w.blocks, w.padded_rows, 1);
  if (size.record == RowRecord::kPlain) return;
  w.block_details = layout.Take<BlockDetail>(w.blocks, w.padded_rows, 1);
  w.row_details = layout.Take<RowDetail>(w.padded_rows, 1, 1);
  w.top_logits = layout.Take<float>(w.padded_rows, kMostTopK, 1);
  w.top_tokens = layout.Take<int32_t>(w.padded_rows, kMostTopK, 1);
}

// What all segments use, one after the other.
void PlaceShared(int64_t hidden, Layout& layout, Workspace& w) {
  w.x = layout.Take<char>(w.padded_rows, hidden, SizeOf(w.operand_type));
  w.scratch = layout.Take<float>(w.threads, w.scratch_floats, 1);
}

void PlaceTeacher(const TeacherSize& teacher, int32_t segments, Layout& layout, TileMemory* memory) {
  Workspace& shared = memory->soft[0].teacher;
  shared.x = layout.Take<char>(shared.padded_rows, teacher.hidden, SizeOf(shared.operand_type));
  shared.row_states = layout.Take<RowState>(shared.padded_rows, 1, 1);
  // Never at work at once.
  shared.scratch = memory->segments[0].scratch;
  if (shared.scratch_floats > memory->segments[0].scratch_floats) {
    shared.scratch = layout.Take<float>(shared.threads, shared.scratch_floats, 1);
  }
  auto* rows = layout.Take<SoftRow>(shared.padded_rows, 1, 1);
  for (int32_t i = 0; i < segments; ++i) {
    const Workspace& own = memory->segments[static_cast<size_t>(i)];
    SoftTile& soft = memory->soft[static_cast<size_t>(i)];
    soft.teacher.x = shared.x;
    soft.teacher.row_states = shared.row_states;
    soft.teacher.scratch = shared.scratch;
    soft.teacher_logits =
        layout.Take<float>(soft.teacher.blocks, soft.teacher.padded_rows, soft.teacher.block_columns);
    soft.teacher.exponentials = soft.teacher_logits;  // where products in fp32 put them by themselves
    soft.logits = layout.Take<float>(own.blocks, own.padded_rows, own.block_columns);
    soft.rows = rows;
  }
}

void PlaceExchange(const TileSize& size, const ExchangeSize& exchange, Layout& layout,
                   ExchangeMemory* memory) {
  const int64_t segments = exchange.segments;
  if (segments == 0) return;
  memory->sums = layout.Take<RowSums>(segments, size.rows, 1);
  memory->top = layout.Take<TopEntry>(segments, size.rows, size.record == RowRecord::kFull ? kMostTopK : 0);
  memory->label_logits = layout.Take<float>(segments, size.rows, 1);
  if (size.teacher != nullptr) memory->soft_sums = layout.Take<SoftSums>(segments, size.rows, 1);
  memory->dx_rows = std::min(size.rows, kExchangeRows);
  memory->dx = layout.Take<float>(segments - 1, memory->dx_rows, size.hidden);
  memory->logit_sums = layout.Take<LogitSums>(segments, exchange.staged_row_bytes > 0 ? size.rows : 0, 1);
  memory->staged = layout.Take<char>(size.rows, exchange.staged_row_bytes, 1);
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

// The segments whose memory decides how many rows a tile has. Fixed ones: all, as if one rank had them, so
// that tiles are the same for any number of ranks. Otherwise the largest, so that they are at all ranks.
int32_t SegmentsToFit(const Shard& shard, PerSegment<int64_t>* entries) {
  int64_t largest = 0;
  for (int32_t i = 0; i < shard.segments(); ++i) {
    const auto at = static_cast<size_t>(i);
    (*entries)[at] = shard.borders[at + 1] - shard.borders[at];
    largest = std::max(largest, (*entries)[at]);
  }
  if (shard.division == Segments::kFixed) return shard.segments();
  (*entries)[0] = largest;
  return 1;
}

bool AreSizes(const TileSize& size, int64_t vocab) {
  return size.rows >= 1 && vocab >= 1 && size.hidden >= 1 &&
         (size.teacher == nullptr || size.teacher->hidden >= 1);
}

bool AreAddressable(const TileSize& size, int64_t vocab) {
  return IsSize(size.rows) && IsSize(vocab) && IsSize(size.hidden) &&
         (size.teacher == nullptr || IsSize(size.teacher->hidden));
}

int64_t TileBytes(const TileSize& size, const Shard& shard, int64_t staged_row_bytes) {
  if (!AreSizes(size, shard.vocab)) return 0;
  if (!AreAddressable(size, shard.vocab)) return INT64_MAX;
  TileMemory memory;
  if (shard.borders.size() == 2) return LayOut(size, {&shard.vocab, 1}, {}, nullptr, &memory);
  PerSegment<int64_t> entries;
  const int32_t segments = SegmentsToFit(shard, &entries);
  return LayOut(size, std::span(entries).first(static_cast<size_t>(segments)),
                {shard.segments(), staged_row_bytes}, nullptr, &memory);
}

// What one row with one thread takes, and each further thread.
struct LeastTile {
  LeastTile(TileSize size, const Shard& shard, int64_t staged_row_bytes) {
    size.rows = 1;
    size.threads = 1;
    bytes = TileBytes(size, shard, staged_row_bytes);
    size.threads = 2;
    thread_bytes = std::max<int64_t>(TileBytes(size, shard, staged_row_bytes) - bytes, 1);
  }
  int64_t bytes = 0;
  int64_t thread_bytes = 0;
};

}  // namespace

int64_t LayOut(const TileSize& size, std::span<const int64_t> entries, const ExchangeSize& exchange,
               void* base, TileMemory* memory) {
  Layout layout(base);
  for (size_t i = 0; i < entries.size(); ++i) {
    Workspace& w = memory->segments[i];
    SetSizes(size, size.hidden, size.arithmetic, entries[i], w);
    if (i == 0) {
      PlaceShared(size.hidden, layout, w);
    } else {
      w.x = memory->segments[0].x;
      w.scratch = memory->segments[0].scratch;
    }
    PlaceSegment(size, layout, w);
    if (size.teacher == nullptr) continue;
    SetSizes(size, size.teacher->hidden, BestArithmetic(size.teacher->weight_type), entries[i],
             memory->soft[i].teacher);
  }
  if (size.teacher != nullptr) {
    PlaceTeacher(*size.teacher, static_cast<int32_t>(entries.size()), layout, memory);
  }
  PlaceExchange(size, exchange, layout, &memory->exchange);
  return layout.bytes();
}

TileSize LargestTile(int64_t bytes, TileSize size, const Shard& shard, int64_t staged_row_bytes) {
  size.rows = 1;
  if (!AreSizes(size, shard.vocab)) return {.rows = 0};
  const LeastTile least(size, shard, staged_row_bytes);
  const int64_t more = std::max<int64_t>(bytes - least.bytes, 0) / 2 / least.thread_bytes;
  size.threads = std::min(Processors(), 1 + more);
  // Bytes saved up for the next thread hold no rows: otherwise that thread would make the tile smaller.
  if (size.threads < Processors()) bytes = std::min(bytes, least.bytes + (2 * more + 1) * least.thread_bytes);
  size.rows = MostWithin(bytes, [&](int64_t rows) {
    size.rows = rows;
    return TileBytes(size, shard, staged_row_bytes);
  });
  return size;
}

int64_t WorkspaceBytes(const TileSize& size, const Shard& shard) {
  TileSize tile = size;
  tile.threads = 1;
  const int64_t by_one = TileBytes(tile, shard, 0);
  if (by_one == 0 || by_one == INT64_MAX) return by_one;
  const LeastTile least(size, shard, 0);
  // As many as LargestTile then finds: they take no more than the further rows do.
  const int64_t more = std::max<int64_t>(by_one - least.bytes - 1, 0) / least.thread_bytes;
  tile.threads = std::min(Processors(), 1 + more);
  const int64_t step = TileBytes(tile, shard, 0);
  if (shard.borders.size() == 2) return step;
  TileSize logits = size;
  logits.teacher = nullptr;
  return std::max(step, LeastTile(logits, shard, StagedRowBytes(shard)).bytes);
}

int64_t StagedRowBytes(const Shard& shard) { return shard.vocab * static_cast<int64_t>(sizeof(float)); }

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record) {
  return WorkspaceBytes({rows, hidden, arithmetic, record}, Vocabulary(nullptr, vocab).shard());
}

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                       const TeacherSize& teacher) {
  return WorkspaceBytes({rows, hidden, arithmetic, RowRecord::kFull, &teacher},
                        Vocabulary(nullptr, vocab).shard());
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, Arithmetic arithmetic, RowRecord record) {
  return LargestTile(bytes, {1, hidden, arithmetic, record}, Vocabulary(nullptr, vocab).shard()).rows;
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, Arithmetic arithmetic,
                   const TeacherSize& teacher) {
  const TileSize size{1, hidden, arithmetic, RowRecord::kFull, &teacher};
  return LargestTile(bytes, size, Vocabulary(nullptr, vocab).shard()).rows;
}

}  // namespace cpu

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, DataType weight_type) {
  return cpu::WorkspaceBytes(rows, vocab, hidden, cpu::BestArithmetic(weight_type));
}

int64_t WorkspaceBytes(int64_t rows, int64_t vocab, int64_t hidden, DataType weight_type,
                       const TeacherSize& teacher) {
  return cpu::WorkspaceBytes(rows, vocab, hidden, cpu::BestArithmetic(weight_type), teacher);
}

int64_t WorkspaceBytes(int64_t rows, const Shard& shard, int64_t hidden, DataType weight_type,
                       const TeacherSize* teacher) {
  return cpu::WorkspaceBytes({rows, hidden, cpu::BestArithmetic(weight_type), cpu::RowRecord::kFull, teacher},
                             shard);
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, DataType weight_type) {
  return cpu::RowsWithin(bytes, vocab, hidden, cpu::BestArithmetic(weight_type));
}

int64_t RowsWithin(int64_t bytes, int64_t vocab, int64_t hidden, DataType weight_type,
                   const TeacherSize& teacher) {
  return cpu::RowsWithin(bytes, vocab, hidden, cpu::BestArithmetic(weight_type), teacher);
}

int64_t RowsWithin(int64_t bytes, const Shard& shard, int64_t hidden, DataType weight_type,
                   const TeacherSize* teacher) {
  const cpu::TileSize size{1, hidden, cpu::BestArithmetic(weight_type), cpu::RowRecord::kFull, teacher};
  return bytes < cpu::WorkspaceBytes(size, shard) ? 0 : cpu::LargestTile(bytes, size, shard).rows;
}

}  // namespace lossd::kernels
