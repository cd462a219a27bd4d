#include "server/engine/device/hold_table.h"

#include <algorithm>
#include <utility>

namespace lossd::engine {
namespace {

bool SameBatch(const HoldName& one, const HoldName& other) {
  return one.hold.number == other.hold.number && one.session == other.session;
}

// How many tokens both have.
int64_t Shared(const HoldTable::Tokens& one, const HoldTable::Tokens& other) {
  if (!SameBatch(one.name, other.name)) return 0;
  return std::max<int64_t>(0, std::min(one.end(), other.end()) - std::max(one.first(), other.first()));
}

}  // namespace

std::optional<int64_t> HoldTable::Allocate(int64_t rows) {
  if (rows > rows_) return std::nullopt;
  const int64_t first = next_ + rows > rows_ ? 0 : next_;
  next_ = first + rows;
  pieces_.remove_if([&](const Piece& piece) { return piece.first_row < next_ && first < piece.end_row; });
  return first;
}

void HoldTable::Add(Tokens tokens, std::vector<int32_t> rows, const HoldTerms& terms, Moments moments) {
  pieces_.remove_if([&tokens](const Piece& piece) { return Shared(piece.tokens, tokens) > 0; });
  const auto last = std::max_element(rows.begin(), rows.end());
  if (last == rows.end() || *last == kNoRow) return;
  Piece& piece = pieces_.emplace_back();
  piece.end_row = *last + 1;
  piece.first_row = *last;
  for (const int32_t row : rows) {
    if (row != kNoRow) piece.first_row = std::min<int64_t>(piece.first_row, row);
  }
  piece.left = static_cast<int64_t>(rows.size());
  piece.tokens = std::move(tokens);
  piece.rows = std::move(rows);
  piece.terms = terms;
  piece.moments = moments;
}

const HoldTable::Piece* HoldTable::PieceOf(const HoldName& name, int64_t token) const {
  const auto found = std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return SameBatch(piece.tokens.name, name) && piece.tokens.first() <= token && token < piece.tokens.end();
  });
  return found == pieces_.end() ? nullptr : &*found;
}

bool HoldTable::Find(const Tokens& tokens, const std::vector<bool>& wanted, const HoldTerms& terms,
                     Moments needed, std::vector<int32_t>* rows) const {
  const Piece* piece = nullptr;
  for (size_t i = 0; i < tokens.labels.size(); ++i) {
    if (!wanted[i]) continue;
    const int64_t token = tokens.first() + static_cast<int64_t>(i);
    if (piece == nullptr || token >= piece->tokens.end()) piece = PieceOf(tokens.name, token);
    if (piece == nullptr || piece->terms != terms) return false;
    if (needed == Moments::kYes && piece->moments == Moments::kNo) return false;
    const auto at = static_cast<size_t>(token - piece->tokens.first());
    if (piece->rows[at] == kNoRow || piece->tokens.labels[at] != tokens.labels[i]) return false;
    rows->push_back(piece->rows[at]);
  }
  return true;
}

void HoldTable::Release(const Tokens& tokens) {
  for (Piece& piece : pieces_) piece.left -= Shared(piece.tokens, tokens);
  pieces_.remove_if([](const Piece& piece) { return piece.left <= 0; });
}

int64_t HoldTable::held_rows() const {
  int64_t rows = 0;
  for (const Piece& piece : pieces_) rows += piece.end_row - piece.first_row;
  return rows;
}

}  // namespace lossd::engine
