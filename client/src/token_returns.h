// What is wanted of each token besides its loss, on its way from the server into the caller's memory. Pure
// functions.
#ifndef LOSSD_CLIENT_SRC_TOKEN_RETURNS_H_
#define LOSSD_CLIENT_SRC_TOKEN_RETURNS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::internal {

// Sizes of the arrays and top_k; INVALID_ARGUMENT names the field and both values.
absl::Status ValidateReturns(const HeadConfig& head, const TokenReturns& returns, int64_t tokens);

bool AnyWanted(const TokenReturns& returns);
v1::WantedReturns WantedOnWire(const TokenReturns& returns);
// Of one token, in an answer.
int64_t BytesOnWire(const TokenReturns& returns);

// Whether `received`, of a chunk of so many tokens, is exactly as long as what was asked for; INTERNAL naming
// the field.
absl::Status CheckReturns(const TokenReturns& returns, int64_t tokens, const v1::TokenReturns& received);
// What CheckReturns accepts, into the places of the tokens from `first` on.
void CopyReturns(const TokenReturns& returns, int64_t first, const v1::TokenReturns& received);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_TOKEN_RETURNS_H_
