#include "server/rpc/transport/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/wire/token.h"

namespace lossd::rpc {
namespace {

constexpr size_t kLongestName = 64;
constexpr int64_t kLargestFile = 1 << 20;

absl::Status Bad(size_t line, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("line ", line, ": ", what));
}

// RFC 6750: letters, digits, -._~+/ and then any number of =.
bool IsBearerToken(absl::string_view token) {
  const absl::string_view body = token.substr(0, token.find_last_not_of('=') + 1);
  if (body.empty()) return false;
  for (const char c : body) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) &&
        absl::string_view("-._~+/").find(c) == absl::string_view::npos) {
      return false;
    }
  }
  return true;
}

bool IsName(absl::string_view name) {
  if (name.size() > kLongestName) return false;
  for (const char c : name) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) return false;
  }
  return true;
}

absl::StatusOr<Token> ParseLine(size_t line, const std::vector<absl::string_view>& words) {
  if (words.size() != 2 && words.size() != 3) {
    return Bad(line, absl::StrCat("has ", words.size(), " words; it must be ROLE TOKEN or ROLE TOKEN NAME"));
  }
  // The first word may be a token whose role was forgotten: it is not told.
  const std::optional<Role> role = ParseRole({words[0].data(), words[0].size()});
  if (!role.has_value()) {
    return Bad(line, "does not begin with a role; it must be one of: read-only, trainer, admin");
  }
  const absl::string_view token = words[1];
  if (token.size() < kShortestToken || token.size() > wire::kLongestToken) {
    return Bad(
        line, absl::StrCat("its token has ", token.size(), " characters; it must have ", kShortestToken,
                           " to ", wire::kLongestToken, ", best from a random source: openssl rand -hex 32"));
  }
  if (!IsBearerToken(token)) {
    return Bad(line,
               "its token has characters that are not letters, digits or one of -._~+/ with = at the end");
  }
  if (words.size() == 3 && !IsName(words[2])) {
    return Bad(line, absl::StrCat("its name must have at most ", kLongestName, " visible ASCII characters"));
  }
  return Token{.hash = HashToken({token.data(), token.size()}),
               .role = *role,
               .name = words.size() == 3 ? std::string(words[2]) : absl::StrCat("line ", line)};
}

}  // namespace

TokenHash HashToken(std::string_view token) {
  TokenHash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

absl::StatusOr<Tokens> Tokens::Parse(std::string_view text) {
  Tokens tokens;
  std::map<TokenHash, size_t> lines;
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0].front() == '#') continue;
    absl::StatusOr<Token> token = ParseLine(number, words);
    if (!token.ok()) return token.status();
    const auto [found, added] = lines.emplace(token->hash, number);
    if (!added) return Bad(number, absl::StrCat("has the token of line ", found->second, " once more"));
    tokens.tokens_.push_back(*std::move(token));
  }
  if (tokens.tokens_.empty()) {
    return absl::InvalidArgumentError(
        "has no token, so that nobody could call anything; it must have lines "
        "ROLE TOKEN, ROLE one of: read-only, trainer, admin");
  }
  return tokens;
}

const Token* Tokens::Find(const TokenHash& hash) const {
  const Token* found = nullptr;
  for (const Token& token : tokens_) {
    if (CRYPTO_memcmp(token.hash.data(), hash.data(), hash.size()) == 0) found = &token;
  }
  return found;
}

TokensChange Tokens::ChangeFrom(const Tokens& before) const {
  TokensChange change;
  for (const Token& token : tokens_) {
    const Token* const old = before.Find(token.hash);
    if (old == nullptr) ++change.added;
    if (old != nullptr && old->role != token.role) ++change.other_role;
  }
  for (const Token& token : before.tokens_) {
    if (Find(token.hash) == nullptr) ++change.removed;
  }
  return change;
}

absl::StatusOr<TokensRead> ReadTokens(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens: cannot read ", path, ": ", std::strerror(errno),
                                                   "; it must be a file that this user may read"));
  }
  if (!S_ISREG(status.st_mode) || status.st_size > kLargestFile) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tokens: ", path, " must be a file of at most ", kLargestFile, " bytes"));
  }
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tokens: cannot read ", path, "; it must be a file that this user may read"));
  }
  absl::StatusOr<Tokens> tokens = Tokens::Parse(text);
  if (!tokens.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens: ", path, ": ", tokens.status().message()));
  }
  TokensRead read{.tokens = *std::move(tokens), .warnings = {}};
  // If the file is another user's, the group is how this one reads it.
  const bool group_reads = (status.st_mode & S_IRGRP) != 0 && status.st_uid == geteuid();
  if (group_reads || (status.st_mode & S_IROTH) != 0) {
    read.warnings.emplace_back("the file of tokens can be read by others than its owner; chmod go-r it");
  }
  return read;
}

}  // namespace lossd::rpc
