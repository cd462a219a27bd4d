// The values that a caller wants for each token besides its loss: checked, asked for, and copied from answers
// into the caller's memory. Pure functions.
#ifndef LOSSD_CLIENT_SRC_BATCH_TOKEN_RETURNS_H_
#define LOSSD_CLIENT_SRC_BATCH_TOKEN_RETURNS_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "client/src/batch/sent_tokens.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Sizes of the arrays and top_k; INVALID_ARGUMENT names the field and both values.
absl::Status ValidateReturns(const HeadConfig& head, const TokenReturns& returns, int64_t tokens);

bool AnyWanted(const TokenReturns& returns);
// Whether anything is wanted that is not 0 wherever a token's weight is.
bool AnyUnweighted(const TokenReturns& returns);
v1::WantedReturns WantedOnWire(const TokenReturns& returns);
// Bytes for one token in an answer.
int64_t BytesOnWire(const TokenReturns& returns);

// Whether `received`, of a chunk of so many tokens, is exactly as long as what was asked for; INTERNAL naming
// the field.
absl::Status CheckReturns(const TokenReturns& returns, int64_t tokens, const v1::TokenReturns& received);
// Copies what CheckReturns accepted to the places of the tokens of these runs.
void CopyReturns(const TokenReturns& returns, std::span<const SentTokens::Run> runs,
                 const v1::TokenReturns& received);
// Sets every return of an ignored token, at its place.
void FillIgnoredReturns(const TokenReturns& returns, int64_t place);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_TOKEN_RETURNS_H_
