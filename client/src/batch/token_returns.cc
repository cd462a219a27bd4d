#include "client/src/batch/token_returns.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"

namespace lossd::internal {
namespace {

constexpr int64_t kMostTopK = 64;   // the server's limit
constexpr int64_t kValueBytes = 4;  // of a float, of a token, of a rank

// One of the arrays.
struct Array {
  const char* name = nullptr;
  std::span<std::byte> room;
  int64_t values = 0;  // for each token
  bool wanted = false;
  const std::string& (v1::TokenReturns::*received)() const = nullptr;
  int of_ignored = 0;  // every byte of an ignored token's

  size_t BytesOf(int64_t tokens) const {
    return wanted ? static_cast<size_t>(tokens * values * kValueBytes) : 0;
  }
};

// 0, or −1 of a token or a rank.
int OfIgnored(std::span<const float> /*room*/) { return 0; }
int OfIgnored(std::span<const int32_t> /*room*/) { return 0xFF; }

std::array<Array, 9> Arrays(const TokenReturns& returns) {
  const auto array = [](const char* name, auto room,
                        const std::string& (v1::TokenReturns::*received)() const) {
    return Array{name, std::as_writable_bytes(room), 1, !room.empty(), received, OfIgnored(room)};
  };
  // The server sends both or neither.
  const auto top = [&](const char* name, auto room,
                       const std::string& (v1::TokenReturns::*received)() const) {
    return Array{name,           std::as_writable_bytes(room), returns.top_k, returns.top_k > 0, received,
                 OfIgnored(room)};
  };
  using Received = v1::TokenReturns;
  return {array("log_sum_exp", returns.log_sum_exp, &Received::log_sum_exp),
          array("z_losses", returns.z_losses, &Received::z_losses),
          array("log_probabilities", returns.log_probabilities, &Received::log_probabilities),
          array("entropies", returns.entropies, &Received::entropies),
          array("predictions", returns.predictions, &Received::predictions),
          array("target_ranks", returns.target_ranks, &Received::target_ranks),
          array("divergences", returns.divergences, &Received::divergences),
          top("top_tokens", returns.top_tokens, &Received::top_tokens),
          top("top_log_probabilities", returns.top_log_probabilities, &Received::top_log_probabilities)};
}

}  // namespace

absl::Status ValidateReturns(const HeadConfig& head, const TokenReturns& returns, int64_t tokens) {
  const int64_t most = std::min(kMostTopK, head.vocab_size);
  if (returns.top_k < 0 || returns.top_k > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", returns.top_k, "; it must be in [0, ", most, "]"));
  }
  for (const Array& array : Arrays(returns)) {
    const auto room = static_cast<int64_t>(array.room.size()) / kValueBytes;
    if (room == 0 || room == tokens * array.values) continue;
    return absl::InvalidArgumentError(absl::StrCat(array.name, " has room for ", room, " values; ", tokens,
                                                   " tokens have ", tokens * array.values));
  }
  return absl::OkStatus();
}

bool AnyWanted(const TokenReturns& returns) { return BytesOnWire(returns) > 0; }

bool AnyUnweighted(const TokenReturns& returns) {
  TokenReturns others = returns;
  others.z_losses = {};
  return AnyWanted(others);
}

v1::WantedReturns WantedOnWire(const TokenReturns& returns) {
  v1::WantedReturns wanted;
  wanted.set_log_sum_exp(!returns.log_sum_exp.empty());
  wanted.set_z_losses(!returns.z_losses.empty());
  wanted.set_log_probabilities(!returns.log_probabilities.empty());
  wanted.set_entropies(!returns.entropies.empty());
  wanted.set_predictions(!returns.predictions.empty());
  wanted.set_target_ranks(!returns.target_ranks.empty());
  wanted.set_divergences(!returns.divergences.empty());
  wanted.set_top_k(returns.top_k);
  return wanted;
}

int64_t BytesOnWire(const TokenReturns& returns) {
  int64_t bytes = 0;
  for (const Array& array : Arrays(returns)) bytes += static_cast<int64_t>(array.BytesOf(1));
  return bytes;
}

absl::Status CheckReturns(const TokenReturns& returns, int64_t tokens, const v1::TokenReturns& received) {
  for (const Array& array : Arrays(returns)) {
    const size_t expected = array.BytesOf(tokens);
    const size_t size = (received.*array.received)().size();
    if (size == expected) continue;
    return absl::InternalError(absl::StrCat("the server sent ", size, " bytes of ", array.name, "; ", tokens,
                                            " tokens have ", expected));
  }
  return absl::OkStatus();
}

void CopyReturns(const TokenReturns& returns, std::span<const SentTokens::Run> runs,
                 const v1::TokenReturns& received) {
  for (const Array& array : Arrays(returns)) {
    const std::string& bytes = (received.*array.received)();
    if (array.room.empty() || bytes.empty()) continue;
    const char* from = bytes.data();
    for (const SentTokens::Run& run : runs) {
      const size_t size = array.BytesOf(run.tokens);
      std::memcpy(array.room.data() + array.BytesOf(run.first), from, size);
      from += size;
    }
  }
}

void FillIgnoredReturns(const TokenReturns& returns, int64_t place) {
  for (const Array& array : Arrays(returns)) {
    if (array.room.empty()) continue;
    std::memset(array.room.data() + array.BytesOf(place), array.of_ignored, array.BytesOf(1));
  }
}

}  // namespace lossd::internal
