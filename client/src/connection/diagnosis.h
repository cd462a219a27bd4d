// Tells apart the failures of connections, with advice for each.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_DIAGNOSIS_H_
#define LOSSD_CLIENT_SRC_CONNECTION_DIAGNOSIS_H_

#include <string>

#include "absl/status/status.h"
#include "lossd/client.h"

namespace lossd::internal {

// Whether another attempt may do better.
enum class ConnectFailure {
  kPassing,   // lossd, or the way to it, may come back
  kCertain,   // trying again cannot help as long as nobody changes anything
  kProbable,  // the same, unless the server is on its way down or up
};
struct Diagnosis {
  ConnectFailure failure = ConnectFailure::kPassing;
  std::string advice = {};  // cause and remedy; empty: none is known beside the status
};
// `status` is that of a call to `target`.
Diagnosis Diagnose(const absl::Status& status, const std::string& target, const ClientOptions& options);

// The status with the advice before its message.
absl::Status Explain(const absl::Status& status, const std::string& target, const ClientOptions& options);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_DIAGNOSIS_H_
