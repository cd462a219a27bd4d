// The lists of tokens that a chunk's distributions are over.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_KEPT_TOKENS_H_
#define LOSSD_SERVER_ENGINE_CHUNK_KEPT_TOKENS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"

namespace lossd::engine {

inline constexpr char kKeptTokensField[] = "token_inputs.kept_tokens";

// Checks the lists of a chunk whose tokens and labels are sane, if it has any, and that nothing else is asked
// for that has no meaning with them. INVALID_ARGUMENT naming the field, what it is and what it must be.
absl::Status ValidateKeptTokens(const Chunk& chunk, const HeadConfig& head);

// Those of a chunk that was checked; none if it has none.
kernels::TokenLists KeptTokensOf(const Chunk& chunk);

// Tokens of the longest list of a chunk that was checked; 0 without lists.
int64_t LongestList(const Chunk& chunk);

// Tokens of the list of each of the tokens of a chunk that was checked that are not ignored; none without
// lists.
std::vector<double> ListSizes(const Chunk& chunk);

// The least power of two that is no less than the chunk's tokens of a row on average; 0 without lists. Chunks
// of one number have lists of like sizes.
int64_t KeptTokensClass(const Chunk& chunk);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_KEPT_TOKENS_H_
