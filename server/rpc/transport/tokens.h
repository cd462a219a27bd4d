// The tokens of --tokens: read, checked, and kept as hashes only.
//
//   # ROLE TOKEN [NAME]
//   trainer k3Jq0f7b2c9d8e1a4f6h run-7
#ifndef LOSSD_SERVER_RPC_TRANSPORT_TOKENS_H_
#define LOSSD_SERVER_RPC_TRANSPORT_TOKENS_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/rpc/transport/roles.h"

namespace lossd::rpc {

inline constexpr size_t kShortestToken = 16;

using TokenHash = std::array<uint8_t, 32>;  // SHA-256
TokenHash HashToken(std::string_view token);

struct Token {
  TokenHash hash;
  Role role;
  std::string name;  // as the file has it; without one "line N"
};

// What became of the tokens of a file.
struct TokensChange {
  int64_t added = 0;
  int64_t removed = 0;
  int64_t other_role = 0;
};

class Tokens {
 public:
  // INVALID_ARGUMENT naming the line and what is wrong with it, never a token: fewer or more words than there
  // may be, an unknown role, a token that is too short, too long, or has characters that a Bearer token has
  // not, one that is there twice. No token at all is an error, too: nobody could call anything.
  static absl::StatusOr<Tokens> Parse(std::string_view text);

  // Null if there is none of that hash. Takes as long whichever it is.
  const Token* Find(const TokenHash& hash) const;
  size_t size() const { return tokens_.size(); }
  TokensChange ChangeFrom(const Tokens& before) const;

 private:
  std::vector<Token> tokens_;
};

struct TokensRead {
  Tokens tokens;
  std::vector<std::string> warnings;  // what is unwise, though it works
};

// The same of a file. INVALID_ARGUMENT naming --tokens and the file.
absl::StatusOr<TokensRead> ReadTokens(const std::string& path);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_TOKENS_H_
