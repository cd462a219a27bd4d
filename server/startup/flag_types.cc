#include "server/startup/flag_types.h"

#include <array>
#include <cctype>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace lossd {
namespace {

// How far a unit shifts, by its first letter.
constexpr std::array<std::pair<char, int>, 4> kUnits = {{{'T', 40}, {'G', 30}, {'M', 20}, {'K', 10}}};

// The library parses a default value as it prints it.
constexpr char kNone[] = "none";

}  // namespace

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  const absl::Status wrong = absl::InvalidArgumentError(absl::StrCat(
      "'", text, "' is no number of bytes; it must be one like 1048576, 64K, 512M or 2G, where K is 1024"));
  std::string number = absl::AsciiStrToUpper(absl::StripAsciiWhitespace(text));
  absl::string_view rest = number;
  const bool named = absl::ConsumeSuffix(&rest, "B");
  const bool binary = named && absl::ConsumeSuffix(&rest, "I");
  int shift = 0;
  for (const auto& [unit, bits] : kUnits) {
    if (shift == 0 && absl::ConsumeSuffix(&rest, std::string(1, unit))) shift = bits;
  }
  if (binary && shift == 0) return wrong;
  int64_t value = 0;
  if (rest.empty() || std::isspace(static_cast<unsigned char>(rest.front())) != 0 ||
      !absl::SimpleAtoi(rest, &value)) {
    return wrong;
  }
  const int64_t most = std::numeric_limits<int64_t>::max() >> shift;
  if (value > most || value < -most) return wrong;
  return value * (int64_t{1} << shift);
}

bool AbslParseFlag(absl::string_view text, Bytes* bytes, std::string* error) {
  const absl::StatusOr<int64_t> value = ParseBytes(text);
  if (!value.ok()) {
    *error = std::string(value.status().message());
    return false;
  }
  bytes->value = *value;
  return true;
}

std::string AbslUnparseFlag(Bytes bytes) {
  for (const auto& [unit, bits] : kUnits) {
    const int64_t one = int64_t{1} << bits;
    if (bytes.value != 0 && bytes.value % one == 0) {
      return absl::StrCat(bytes.value / one, std::string(1, unit));
    }
  }
  return absl::StrCat(bytes.value);
}

bool AbslParseFlag(absl::string_view text, GuardFile* file, std::string* error) {
  if (text.empty()) {
    *error = "it must name a file; leave the flag out, or say none, if there is none";
    return false;
  }
  file->name = text == kNone ? std::string() : std::string(text);
  return true;
}

std::string AbslUnparseFlag(const GuardFile& file) { return file.name.empty() ? kNone : file.name; }

}  // namespace lossd
