#include "server/engine/device/hold_table.h"

#include <algorithm>

namespace lossd::engine {
namespace {

bool SameBatch(const HoldName& one, const HoldName& other) {
  return one.hold.number == other.hold.number && one.session == other.session;
}

}  // namespace

std::optional<int64_t> HoldTable::Allocate(int64_t rows) {
  if (rows > rows_) return std::nullopt;
  const int64_t first = next_ + rows > rows_ ? 0 : next_;
  next_ = first + rows;
  pieces_.remove_if([&](const Piece& piece) { return piece.first_row < next_ && first < piece.end_row; });
  return first;
}

void HoldTable::Add(const Tokens& tokens, int64_t first_row, const HoldTerms& terms, bool has_moments) {
  const int64_t first = tokens.name.hold.first;
  const int64_t end = first + static_cast<int64_t>(tokens.labels.size());
  pieces_.remove_if([&](const Piece& piece) {
    return SameBatch(piece.name, tokens.name) && piece.first() < end && first < piece.end();
  });
  Piece& piece = pieces_.emplace_back();
  piece.name = tokens.name;
  piece.labels.assign(tokens.labels.begin(), tokens.labels.end());
  piece.first_row = first_row;
  piece.terms = terms;
  piece.has_moments = has_moments;
  piece.left = static_cast<int64_t>(tokens.labels.size());
  piece.rows.reserve(tokens.labels.size());
  for (const int64_t label : tokens.labels) {
    piece.rows.push_back(label == tokens.ignore_index ? -1 : static_cast<int32_t>(first_row++));
  }
  piece.end_row = first_row;
}

const HoldTable::Piece* HoldTable::PieceOf(const HoldName& name, int64_t token) const {
  const auto found = std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return SameBatch(piece.name, name) && piece.first() <= token && token < piece.end();
  });
  return found == pieces_.end() ? nullptr : &*found;
}

bool HoldTable::Find(const Tokens& tokens, const std::vector<bool>& wanted, const HoldTerms& terms,
                     bool needs_moments, std::vector<int32_t>* rows) const {
  const Piece* piece = nullptr;
  for (size_t i = 0; i < tokens.labels.size(); ++i) {
    if (!wanted[i]) continue;
    const int64_t token = tokens.name.hold.first + static_cast<int64_t>(i);
    if (piece == nullptr || token >= piece->end()) piece = PieceOf(tokens.name, token);
    if (piece == nullptr || piece->terms != terms || (needs_moments && !piece->has_moments)) return false;
    const auto at = static_cast<size_t>(token - piece->first());
    if (piece->rows[at] < 0 || piece->labels[at] != tokens.labels[i]) return false;
    rows->push_back(piece->rows[at]);
  }
  return true;
}

void HoldTable::Release(const Tokens& tokens) {
  const int64_t first = tokens.name.hold.first;
  const int64_t end = first + static_cast<int64_t>(tokens.labels.size());
  for (Piece& piece : pieces_) {
    if (!SameBatch(piece.name, tokens.name)) continue;
    piece.left -= std::max<int64_t>(0, std::min(end, piece.end()) - std::max(first, piece.first()));
  }
  pieces_.remove_if([](const Piece& piece) { return piece.left <= 0; });
}

int64_t HoldTable::held_rows() const {
  int64_t rows = 0;
  for (const Piece& piece : pieces_) rows += piece.end_row - piece.first_row;
  return rows;
}

}  // namespace lossd::engine
