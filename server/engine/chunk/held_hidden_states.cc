#include "server/engine/chunk/held_hidden_states.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {
namespace {

// What it takes to remember a piece is not counted, so that there are only so many of them.
constexpr int64_t kFewPieces = 1024;
constexpr int64_t kBytesOfPiece = int64_t{64} << 10;  // on average, of more

int64_t LabelAt(const Chunk& chunk, int64_t token) {
  int64_t label = 0;
  std::memcpy(&label, chunk.labels.data() + token * static_cast<int64_t>(sizeof(label)), sizeof(label));
  return label;
}

std::vector<int64_t> ValidLabels(const Chunk& chunk) {
  std::vector<int64_t> labels;
  labels.reserve(static_cast<size_t>(chunk.tokens));
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    if (const int64_t label = LabelAt(chunk, i); label != chunk.ignore_index) labels.push_back(label);
  }
  return labels;
}

// The rows of tokens that are not ignored, one behind the other.
void CopyValidRows(const Chunk& chunk, int64_t row_bytes, std::byte* out) {
  PayloadReader reader(chunk.hidden_states);
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    const bool ignored = LabelAt(chunk, i) == chunk.ignore_index;
    for (int64_t left = row_bytes; left > 0;) {
      const ByteSpan part = reader.Next(left);
      left -= static_cast<int64_t>(part.size());
      if (ignored) continue;
      std::memcpy(out, part.data(), part.size());
      out += part.size();
    }
  }
}

int64_t CountedBytes(const HeldHiddenStates::Piece& piece) {
  return piece.tokens() * std::max(piece.row_bytes, kLeastHeldBytes);
}

}  // namespace

// Puts together the hidden states of a chunk: rows of pieces, and zeros.
class HeldHiddenStates::Finder {
 public:
  // `pieces` may be null.
  Finder(Pieces* pieces, kernels::DataType type, int64_t row_bytes)
      : pieces_(pieces), type_(type), row_bytes_(row_bytes) {}

  // False if the row of this token is not held, or not with this label.
  bool Add(int64_t token, int64_t label) {
    if ((piece_ == nullptr || token >= piece_->end()) && !GoTo(token)) return false;
    const int64_t at = token - piece_->first;
    if (piece_->labels[static_cast<size_t>(at)] != label) return false;
    AddPart({piece_->rows.get() + at * row_bytes_, static_cast<size_t>(row_bytes_)});
    ++taken_.back().second;
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
  // The pieces that were used, and how many of their tokens.
  const std::vector<std::pair<Piece*, int64_t>>& taken() const { return taken_; }

 private:
  bool GoTo(int64_t token) {
    if (pieces_ == nullptr) return false;
    const auto behind = pieces_->upper_bound(token);
    if (behind == pieces_->begin()) return false;
    piece_ = &std::prev(behind)->second;
    if (token >= piece_->end() || piece_->type != type_) return false;
    owner_->push_back(piece_->rows);
    taken_.emplace_back(piece_, 0);
    return true;
  }
  // Rows next to each other are one part.
  void AddPart(ByteSpan row) {
    if (!parts_.empty() && parts_.back().data() + parts_.back().size() == row.data()) {
      parts_.back() = {parts_.back().data(), parts_.back().size() + row.size()};
    } else {
      parts_.push_back(row);
    }
  }

  Pieces* const pieces_;
  const kernels::DataType type_;
  const int64_t row_bytes_;
  Piece* piece_ = nullptr;
  Rows zeros_;
  std::vector<ByteSpan> parts_;
  std::shared_ptr<std::vector<Rows>> owner_ = std::make_shared<std::vector<Rows>>();
  std::vector<std::pair<Piece*, int64_t>> taken_;
};

std::optional<HeldHiddenStates::Piece> HeldHiddenStates::Copy(const Chunk& chunk) {
  Piece piece{.number = chunk.hold.number,
              .first = chunk.hold.first,
              .type = chunk.hidden_type,
              .row_bytes = chunk.hidden_states.size() / chunk.tokens,
              .labels = ValidLabels(chunk),
              .rows = nullptr};
  piece.left = piece.tokens();
  piece.rows = MakeRoom(piece.number, CountedBytes(piece));
  if (piece.rows == nullptr) return std::nullopt;
  CopyValidRows(chunk, piece.row_bytes, piece.rows.get());
  return piece;
}

void HeldHiddenStates::Add(Piece piece) {
  if (piece.tokens() == 0) return;
  Pieces replaced;  // freed without the lock
  const MutexLock lock(mutex_);
  auto batch = FindBatch(piece.number);
  if (batch == batches_.end()) batch = batches_.insert(batches_.end(), Batch{.number = piece.number});
  Pieces& pieces = batch->pieces;
  auto next = pieces.upper_bound(piece.first);
  if (next != pieces.begin() && std::prev(next)->second.end() > piece.first) --next;
  while (next != pieces.end() && next->first < piece.end()) {
    replaced.insert(pieces.extract(next++));
    --pieces_;
  }
  const int64_t first = piece.first;
  pieces.emplace(first, std::move(piece));
  ++pieces_;
}

absl::Status HeldHiddenStates::Take(int64_t hidden_size, Chunk* chunk) {
  const int64_t row_bytes = hidden_size * kernels::SizeOf(chunk->hidden_type);
  const uint64_t number = chunk->hold.number;
  const auto missing = [chunk](int64_t token) {
    return absl::NotFoundError(absl::StrCat("those of token ", token, " of hold ", chunk->hold.number,
                                            " are not held as ", kernels::Name(chunk->hidden_type),
                                            " and with this label"));
  };
  int64_t token = chunk->hold.first;
  if (token < 0 || token > std::numeric_limits<int64_t>::max() - chunk->tokens) return missing(token);
  const MutexLock lock(mutex_);
  const auto batch = FindBatch(number);
  Finder finder(batch == batches_.end() ? nullptr : &batch->pieces, chunk->hidden_type, row_bytes);
  for (int64_t i = 0; i < chunk->tokens; ++i) {
    const int64_t label = LabelAt(*chunk, i);
    if (label == chunk->ignore_index) {
      finder.AddZeros();
    } else if (!finder.Add(token++, label)) {
      return missing(token - 1);
    }
  }
  chunk->hidden_states = finder.Take(chunk->tokens * row_bytes);
  for (const auto& [piece, tokens] : finder.taken()) {
    piece->left -= tokens;
    if (piece->left > 0) continue;
    const int64_t first = piece->first;
    batch->pieces.erase(first);
    --pieces_;
  }
  if (batch != batches_.end() && batch->pieces.empty()) batches_.erase(batch);
  return absl::OkStatus();
}

HeldHiddenStates::Batches::iterator HeldHiddenStates::FindBatch(uint64_t number) {
  return std::find_if(batches_.begin(), batches_.end(),
                      [number](const Batch& batch) { return batch.number == number; });
}

int64_t HeldHiddenStates::MostPieces() const { return kFewPieces + limit_ / kBytesOfPiece; }

bool HeldHiddenStates::HasRoom(int64_t bytes) const {
  return *used_ + bytes <= limit_ && pieces_ < MostPieces();
}

int64_t HeldHiddenStates::FreeWithout(uint64_t number) const {
  int64_t free = limit_ - *used_;
  for (const Batch& batch : batches_) {
    if (batch.number == number) continue;
    for (const auto& [first, piece] : batch.pieces) {
      const bool in_use = piece.rows.use_count() > 1;  // by a chunk that is under way
      if (!in_use) free += CountedBytes(piece);
    }
  }
  return free;
}

HeldHiddenStates::Rows HeldHiddenStates::MakeRoom(uint64_t number, int64_t bytes) {
  const MutexLock lock(mutex_);
  // Others would go for nothing.
  const auto own = FindBatch(number);
  const int64_t own_pieces = own == batches_.end() ? 0 : static_cast<int64_t>(own->pieces.size());
  if (own_pieces >= MostPieces()) return nullptr;
  if (!HasRoom(bytes) && FreeWithout(number) < bytes) return nullptr;
  for (auto oldest = batches_.begin(); !HasRoom(bytes);) {
    if (oldest == own && own != batches_.end()) ++oldest;
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

}  // namespace lossd::engine
