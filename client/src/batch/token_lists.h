// The lists of tokens of a batch, kept ones or those of soft targets: checked, and cut with its chunks.
#ifndef LOSSD_CLIENT_SRC_BATCH_TOKEN_LISTS_H_
#define LOSSD_CLIENT_SRC_BATCH_TOKEN_LISTS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/src/batch/sent_tokens.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Most tokens in the lists of a chunk: the server's limit.
inline constexpr int64_t kMostListedTokens = int64_t{1} << 20;

// That the offsets fit the labels and the lists, that the lists have probabilities where these are soft
// targets, and that a batch has lists of one kind; what is in them the server checks. INVALID_ARGUMENT names
// the field and both values.
absl::Status ValidateTokenLists(const Batch& batch);

// The lists of the batch, of whichever kind, their field's name, and the bytes on the wire of each token in
// them.
const TokenLists& ListsOf(const Batch& batch);
absl::string_view ListsField(const Batch& batch);
int64_t ListedTokenBytes(const Batch& batch);

// Where the list of each token that is sent ends when they stand one behind the other, from 0 on: one more
// than there are such tokens. Empty without lists.
std::vector<int64_t> ListEnds(const Batch& batch, const SentTokens& sent);

// Sets the lists of the tokens of these runs, one behind the other.
void SetLists(const TokenLists& lists, std::span<const SentTokens::Run> runs, v1::TokenLists* proto);
void SetTargetLists(const TargetLists& targets, std::span<const SentTokens::Run> runs,
                    v1::TargetLists* proto);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_TOKEN_LISTS_H_
