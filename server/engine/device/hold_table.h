// Which rows of a batch's first phase a device still holds for its second, and whose they are. Memory is a
// ring of rows: what is held anew takes the place of what was held longest.
//
// Belongs to one thread.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_HOLD_TABLE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_HOLD_TABLE_H_

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/engine/chunk/chunk.h"

namespace lossd::engine {

// Tokens of a session's batch. A number of 0 is no hold.
struct HoldName {
  std::string session;
  Hold hold;
};

// What held rows are good for, beside their tokens and labels.
struct HoldTerms {
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  Bias bias = Bias::kIgnore;

  bool operator==(const HoldTerms&) const = default;
};

enum class Moments { kNo, kYes };  // whether there are sums that gradients of the entropy take

class HoldTable {
 public:
  explicit HoldTable(int64_t rows) : rows_(rows) {}

  // Tokens of a batch that are not ignored, one after the other from `name.hold.first` on: their labels.
  struct Tokens {
    HoldName name;
    std::vector<int32_t> labels;

    int64_t first() const { return name.hold.first; }
    int64_t end() const { return first() + static_cast<int64_t>(labels.size()); }
  };
  static constexpr int32_t kNoRow = -1;  // of a token that was not computed

  // Makes room for so many rows, 0 or more, one after the other, and returns the first of them; none if there
  // never is. Whatever has one of these rows is forgotten.
  std::optional<int64_t> Allocate(int64_t rows);
  // These tokens' rows, [tokens], are held where Allocate has made room, in place of what was held of any of
  // them.
  void Add(Tokens tokens, std::vector<int32_t> rows, const HoldTerms& terms, Moments moments);

  // Where the rows of the tokens are that are `wanted`, [tokens], appended to *rows; false if not all of them
  // are held by the same terms, with the same labels, and with moments if those are needed.
  bool Find(const Tokens& tokens, const std::vector<bool>& wanted, const HoldTerms& terms, Moments needed,
            std::vector<int32_t>* rows) const;
  // These tokens are not needed any more.
  void Release(const Tokens& tokens);
  // Nothing is: the weights are others.
  void Clear() { pieces_.clear(); }

  int64_t rows() const { return rows_; }
  int64_t held_rows() const;

 private:
  struct Piece {
    Tokens tokens;
    std::vector<int32_t> rows;
    int64_t first_row = 0;
    int64_t end_row = 0;
    int64_t left = 0;  // tokens that were not released
    HoldTerms terms;
    Moments moments = Moments::kNo;
  };

  // The piece that has this token of a batch; null: none.
  const Piece* PieceOf(const HoldName& name, int64_t token) const;

  const int64_t rows_;
  int64_t next_ = 0;         // where the next rows go, if they fit behind
  std::list<Piece> pieces_;  // each has a row at least, so there are no more of them than rows
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_HOLD_TABLE_H_
