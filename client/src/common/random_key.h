// Names that no other client chooses.
#ifndef LOSSD_CLIENT_SRC_COMMON_RANDOM_KEY_H_
#define LOSSD_CLIENT_SRC_COMMON_RANDOM_KEY_H_

#include <string>

#include "absl/strings/string_view.h"

namespace lossd::internal {

// `prefix` and 128 random bits. Thread-safe.
std::string RandomKey(absl::string_view prefix);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_COMMON_RANDOM_KEY_H_
