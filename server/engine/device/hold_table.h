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

// Tokens of a session's batch, numbered by the client. A number of 0 is none.
struct HoldName {
  std::string session;
  Hold hold;

  bool wanted() const { return hold.number != 0; }
};

// What held rows are good for, beside their tokens and labels.
struct HoldTerms {
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  Bias bias = Bias::kIgnore;

  bool operator==(const HoldTerms&) const = default;
};

class HoldTable {
 public:
  explicit HoldTable(int64_t rows = 0) : rows_(rows) {}

  // Some tokens of one name, which are rows one after the other but for those that are ignored.
  struct Tokens {
    HoldName name;
    std::span<const int64_t> labels;
    int64_t ignore_index = -100;
  };

  // Makes room for so many rows, 0 or more, one after the other, and returns the first of them; none if there
  // never is. Whatever has one of these rows is forgotten.
  std::optional<int64_t> Allocate(int64_t rows);
  // These tokens' rows are held from `first_row` on, which Allocate has given, in place of what was held of
  // any of them.
  void Add(const Tokens& tokens, int64_t first_row, const HoldTerms& terms, bool has_moments);

  // Where the rows of the tokens are for which `wanted` is true, appended to *rows, and whether all of them
  // are held, by the same terms and with the same labels, and with moments if those are needed. A token whose
  // row was not held is not found.
  bool Find(const Tokens& tokens, const std::vector<bool>& wanted, const HoldTerms& terms, bool needs_moments,
            std::vector<int32_t>* rows) const;
  // These tokens are not needed any more.
  void Release(const Tokens& tokens);
  // Nothing is: the weights are others.
  void Clear() { pieces_.clear(); }

  int64_t rows() const { return rows_; }
  int64_t held_rows() const;

 private:
  struct Piece {
    HoldName name;
    std::vector<int64_t> labels;
    std::vector<int32_t> rows;  // of each token; negative: none
    int64_t first_row = 0;
    int64_t end_row = 0;
    int64_t left = 0;  // tokens that were not released
    HoldTerms terms;
    bool has_moments = false;

    int64_t first() const { return name.hold.first; }
    int64_t end() const { return first() + static_cast<int64_t>(labels.size()); }
  };

  // The piece that has this token of a name; null: none.
  const Piece* PieceOf(const HoldName& name, int64_t token) const;

  const int64_t rows_;
  int64_t next_ = 0;         // where the next rows go, if they fit behind
  std::list<Piece> pieces_;  // few: those of batches between their phases
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_HOLD_TABLE_H_
