// The lists of tokens of a chunk: what its distributions are over, or soft targets.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_TOKEN_LISTS_H_
#define LOSSD_SERVER_ENGINE_CHUNK_TOKEN_LISTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"

namespace lossd::engine {

inline constexpr char kKeptTokensField[] = "token_inputs.kept_tokens";
inline constexpr char kTargetListsField[] = "token_inputs.target_lists";

// Which of these a chunk with lists has.
const char* FieldOf(const ChunkLists& lists);

// Checks the lists of a chunk whose tokens and labels are sane, if it has any, and that nothing else is asked
// for that has no meaning with them. INVALID_ARGUMENT naming the field, what it is and what it must be.
absl::Status ValidateLists(const Chunk& chunk, const HeadConfig& head);

// Those of a chunk that was checked; none if it has none of this use.
kernels::TokenLists KeptTokensOf(const Chunk& chunk);
kernels::TargetLists TargetListsOf(const Chunk& chunk);

// Brings the lists of soft targets of a chunk that was checked into the order that kernels want.
void SortTargets(Chunk& chunk);

// Empties the lists of ignored tokens, which nothing is made of.
void DropIgnoredLists(Chunk& chunk);

// Those of `rows` tokens from `first` on.
ChunkLists SliceLists(const ChunkLists& lists, int64_t first, int64_t rows);

// Makes room for so many tokens in lists of this use.
void ReserveLists(int64_t tokens, ChunkLists::Use use, ChunkLists* lists);
// Puts lists behind those that there are; `lists` are of the same use, or none yet.
void AppendLists(const ChunkLists& more, ChunkLists* lists);

// Tokens in all lists together.
int64_t ListedTokens(const ChunkLists& lists);

// How many of `rows` tokens, from the first on, have lists with at most `most` tokens together.
int64_t RowsWithin(const ChunkLists& lists, int64_t rows, int64_t most);

// Tokens of the longest list of a chunk that was checked; 0 without lists.
int64_t LongestList(const Chunk& chunk);

// Tokens of the list of each of the tokens of a chunk that was checked that are not ignored; none without
// lists.
std::vector<double> ListSizes(const Chunk& chunk);

// What chunks of one batch have in common. `size_class`: the least power of two that is no less than a
// chunk's tokens of a list on average, so that lists of like sizes meet; 0 without lists, and for what is a
// batch by itself.
struct ListKind {
  ChunkLists::Use use = ChunkLists::Use::kNone;
  int64_t size_class = 0;
  kernels::Distillation targets = {};

  bool operator==(const ListKind&) const = default;
};
ListKind ListKindOf(const Chunk& chunk);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_TOKEN_LISTS_H_
