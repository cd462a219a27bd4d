// The file of --tokens.
#include <algorithm>
#include <string>

#include "proto/wire/token.h"
#include "server/rpc/transport/tokens.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

std::string_view NextWord(std::string_view* line) {
  constexpr std::string_view kBlanks = " \t\r";
  line->remove_prefix(std::min(line->find_first_not_of(kBlanks), line->size()));
  const std::string_view word = line->substr(0, line->find_first_of(kBlanks));
  line->remove_prefix(word.size());
  return word;
}

// Each line gives the token that it has, with its role, and nothing else does.
void CheckTokens(std::string_view text, const rpc::Tokens& tokens) {
  size_t found = 0;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::string_view role = NextWord(&line);
    const std::string_view token = NextWord(&line);
    if (role.empty() || role.starts_with('#')) continue;
    const rpc::Token* const entry = tokens.Find(rpc::HashToken(token));
    Expect(entry != nullptr && entry->role == rpc::ParseRole(role), "a line gives its token");
    Expect(token.size() >= rpc::kShortestToken && token.size() <= wire::kLongestToken, "tokens have sizes");
    ++found;
  }
  Expect(found == tokens.size() && found > 0, "there are as many tokens as lines");
  Expect(tokens.Find(rpc::HashToken("")) == nullptr, "nobody comes in without one");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = lossd::fuzz::TextOf(data, size);
  const auto tokens = lossd::rpc::Tokens::Parse(text);
  if (tokens.ok()) lossd::fuzz::CheckTokens(text, *tokens);
  return 0;
}
