// The lists of tokens of a batch: checked, and cut with its chunks.
#ifndef LOSSD_CLIENT_SRC_BATCH_KEPT_TOKENS_H_
#define LOSSD_CLIENT_SRC_BATCH_KEPT_TOKENS_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "client/src/batch/sent_tokens.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Most tokens in the lists of a chunk: the server's limit.
inline constexpr int64_t kMostKeptTokens = int64_t{1} << 20;

// That the offsets fit `tokens` and the lists; what is in these the server checks. INVALID_ARGUMENT names the
// field and both values.
absl::Status ValidateKeptTokens(const TokenLists& lists, size_t tokens);

// Tokens of the longest list of those that are sent; 0 without lists.
enum class Ignored { kSent, kLeftOut };
int64_t LongestList(const Batch& batch, Ignored ignored);

// Sets the lists of the tokens of these runs, one behind the other.
void SetLists(const TokenLists& lists, std::span<const SentTokens::Run> runs, v1::TokenLists* proto);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_KEPT_TOKENS_H_
