#include "client/src/common/random_key.h"

#include <random>

#include "absl/strings/str_cat.h"

namespace lossd::internal {

std::string RandomKey(absl::string_view prefix) {
  std::random_device random;
  std::string key(prefix);
  for (int i = 0; i < 4; ++i) absl::StrAppend(&key, "-", absl::Hex(random(), absl::kZeroPad8));
  return key;
}

}  // namespace lossd::internal
