// Types of flags whose values have to be more than a number or a text.
#ifndef LOSSD_SERVER_STARTUP_FLAG_TYPES_H_
#define LOSSD_SERVER_STARTUP_FLAG_TYPES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd {

// "1048576", "64K", "512M", "2G", "1T", also "2GB", "2GiB" and in small letters; K is 1024. INVALID_ARGUMENT,
// naming what it may be, for what is none or does not fit 64 bits.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);

struct Bytes {
  int64_t value = 0;
};
bool AbslParseFlag(absl::string_view text, Bytes* bytes, std::string* error);
std::string AbslUnparseFlag(Bytes bytes);

// A file that guards the server: with an empty name, of a variable that was never set for instance, it would
// be open to everybody. Who wants none leaves the flag out, or says "none".
struct GuardFile {
  std::string name;
};
bool AbslParseFlag(absl::string_view text, GuardFile* file, std::string* error);
std::string AbslUnparseFlag(const GuardFile& file);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_FLAG_TYPES_H_
