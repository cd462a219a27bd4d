// Limits of a client's connection: bytes of metadata, and age.
#ifndef LOSSD_SERVER_RPC_CONNECTIONS_CONNECTION_LIMITS_H_
#define LOSSD_SERVER_RPC_CONNECTIONS_CONNECTION_LIMITS_H_

#include <cstdint>

#include "absl/time/time.h"

namespace lossd::rpc {

struct ConnectionLimits {
  int64_t max_metadata_bytes = 8 << 10;  // of a call's headers, in and out
  // Clients are told to connect anew after so long, more or less, and cut off after the grace.
  absl::Duration max_age = absl::InfiniteDuration();
  absl::Duration max_age_grace = absl::Minutes(10);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTIONS_CONNECTION_LIMITS_H_
