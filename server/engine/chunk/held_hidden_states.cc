#include "server/engine/chunk/held_hidden_states.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {
namespace {

// What it takes to remember a piece is not counted, so that there are only so many of them.
constexpr int64_t kFewPieces = 1024;
constexpr int64_t kBytesOfPiece = 4096;  // on average, of more

bool IsIgnored(const Chunk& chunk, int64_t token) {
  int64_t label = 0;
  std::memcpy(&label, chunk.labels.data() + token * static_cast<int64_t>(sizeof(label)), sizeof(label));
  return label == chunk.ignore_index;
}

int64_t CountValid(const Chunk& chunk) {
  int64_t count = 0;
  for (int64_t i = 0; i < chunk.tokens; ++i) count += static_cast<int64_t>(!IsIgnored(chunk, i));
  return count;
}

// The rows of tokens that are not ignored, one behind the other.
void CopyValidRows(const Chunk& chunk, int64_t row_bytes, std::byte* out) {
  PayloadReader reader(chunk.hidden_states);
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    const bool ignored = IsIgnored(chunk, i);
    for (int64_t left = row_bytes; left > 0;) {
      const ByteSpan part = reader.Next(left);
      left -= static_cast<int64_t>(part.size());
      if (ignored) continue;
      std::memcpy(out, part.data(), part.size());
      out += part.size();
    }
  }
}

}  // namespace

// Puts together the hidden states of a chunk: rows of pieces, and zeros.
class HeldHiddenStates::Finder {
 public:
  // `pieces` may be null.
  Finder(const Pieces* pieces, kernels::DataType type, int64_t row_bytes)
      : pieces_(pieces), type_(type), row_bytes_(row_bytes) {}

  // False if the row of this token is not held.
  bool Add(int64_t token) {
    if (piece_ == nullptr || token >= first_ + piece_->tokens) {
      if (!GoTo(token)) return false;
      owner_->push_back(piece_->rows);
    }
    AddPart({piece_->rows.get() + (token - first_) * row_bytes_, static_cast<size_t>(row_bytes_)});
    return true;
  }
  void AddZeros() {
    if (zeros_ == nullptr) {
      zeros_ = Rows(new std::byte[static_cast<size_t>(row_bytes_)](), std::default_delete<std::byte[]>());
      owner_->push_back(zeros_);
    }
    AddPart({zeros_.get(), static_cast<size_t>(row_bytes_)});
  }
  Payload Take(int64_t bytes) { return {std::move(parts_), std::move(owner_), bytes}; }

 private:
  bool GoTo(int64_t token) {
    if (pieces_ == nullptr) return false;
    const auto behind = pieces_->upper_bound(token);
    if (behind == pieces_->begin()) return false;
    first_ = std::prev(behind)->first;
    piece_ = &std::prev(behind)->second;
    return token < first_ + piece_->tokens && piece_->type == type_;
  }
  // Rows next to each other are one part.
  void AddPart(ByteSpan row) {
    if (!parts_.empty() && parts_.back().data() + parts_.back().size() == row.data()) {
      parts_.back() = {parts_.back().data(), parts_.back().size() + row.size()};
    } else {
      parts_.push_back(row);
    }
  }

  const Pieces* const pieces_;
  const kernels::DataType type_;
  const int64_t row_bytes_;
  const Piece* piece_ = nullptr;
  int64_t first_ = 0;  // token of it
  Rows zeros_;
  std::vector<ByteSpan> parts_;
  std::shared_ptr<std::vector<Rows>> owner_ = std::make_shared<std::vector<Rows>>();
};

bool HeldHiddenStates::Keep(const Chunk& chunk) {
  Piece piece{.tokens = CountValid(chunk),
              .row_bytes = chunk.hidden_states.size() / chunk.tokens,
              .type = chunk.hidden_type,
              .rows = nullptr};
  if (piece.tokens == 0) return true;
  Drop(chunk.hold.number, chunk.hold.first, piece.tokens);
  piece.rows = MakeRoom(chunk.hold.number, piece.bytes());
  if (piece.rows == nullptr) return false;
  CopyValidRows(chunk, piece.row_bytes, piece.rows.get());
  Add(chunk.hold.number, chunk.hold.first, std::move(piece));
  return true;
}

absl::Status HeldHiddenStates::Recall(int64_t hidden_size, Chunk* chunk) {
  const int64_t row_bytes = hidden_size * kernels::SizeOf(chunk->hidden_type);
  const auto missing = [chunk](int64_t token) {
    return absl::NotFoundError(absl::StrCat("hidden states of token ", token, " of hold ", chunk->hold.number,
                                            " are not held as ", kernels::Name(chunk->hidden_type)));
  };
  int64_t token = chunk->hold.first;
  if (token < 0 || token > std::numeric_limits<int64_t>::max() - chunk->tokens) return missing(token);
  const MutexLock lock(mutex_);
  const auto batch = FindBatch(chunk->hold.number);
  Finder finder(batch == batches_.end() ? nullptr : &batch->pieces, chunk->hidden_type, row_bytes);
  for (int64_t i = 0; i < chunk->tokens; ++i) {
    if (IsIgnored(*chunk, i)) {
      finder.AddZeros();
    } else if (!finder.Add(token++)) {
      return missing(token - 1);
    }
  }
  chunk->hidden_states = finder.Take(chunk->tokens * row_bytes);
  return absl::OkStatus();
}

HeldHiddenStates::Batches::iterator HeldHiddenStates::FindBatch(uint64_t number) {
  return std::find_if(batches_.begin(), batches_.end(),
                      [number](const Batch& batch) { return batch.number == number; });
}

void HeldHiddenStates::Drop(uint64_t number, int64_t first, int64_t tokens) {
  const MutexLock lock(mutex_);
  const auto batch = FindBatch(number);
  if (batch == batches_.end()) return;
  auto next = batch->pieces.upper_bound(first);
  if (next != batch->pieces.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.tokens > first) next = before;
  }
  while (next != batch->pieces.end() && next->first < first + tokens) {
    batch->bytes -= next->second.bytes();
    next = batch->pieces.erase(next);
    --pieces_;
  }
  if (batch->pieces.empty()) batches_.erase(batch);
}

bool HeldHiddenStates::HasRoom(int64_t bytes) const {
  return *used_ + bytes <= limit_ && pieces_ < kFewPieces + limit_ / kBytesOfPiece;
}

HeldHiddenStates::Rows HeldHiddenStates::MakeRoom(uint64_t number, int64_t bytes) {
  const MutexLock lock(mutex_);
  const auto own = FindBatch(number);
  // Others would go for nothing.
  if ((own == batches_.end() ? 0 : own->bytes) + bytes > limit_) return nullptr;
  for (auto oldest = batches_.begin(); !HasRoom(bytes);) {
    if (oldest == own) ++oldest;
    if (oldest == batches_.end()) return nullptr;
    pieces_ -= static_cast<int64_t>(oldest->pieces.size());
    oldest = batches_.erase(oldest);
  }
  *used_ += bytes;
  return {new std::byte[static_cast<size_t>(bytes)], [used = used_, bytes](const std::byte* memory) {
            delete[] memory;
            *used -= bytes;
          }};
}

void HeldHiddenStates::Add(uint64_t number, int64_t first, Piece piece) {
  const MutexLock lock(mutex_);
  auto batch = FindBatch(number);
  if (batch == batches_.end()) batch = batches_.insert(batches_.end(), Batch{.number = number});
  batch->bytes += piece.bytes();
  // Another lane may have brought the same tokens meanwhile.
  if (const auto there = batch->pieces.find(first); there != batch->pieces.end()) {
    batch->bytes -= there->second.bytes();
    there->second = std::move(piece);
    return;
  }
  batch->pieces.emplace(first, std::move(piece));
  ++pieces_;
}

}  // namespace lossd::engine
