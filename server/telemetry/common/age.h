// Ages for display, by the clock that is shown.
#ifndef LOSSD_SERVER_TELEMETRY_COMMON_AGE_H_
#define LOSSD_SERVER_TELEMETRY_COMMON_AGE_H_

#include <algorithm>

#include "absl/time/time.h"

namespace lossd::telemetry {

// In seconds; 0 if the clock was set back since.
inline double AgeAt(absl::Time now, absl::Time since) {
  return std::max(0.0, absl::ToDoubleSeconds(now - since));
}

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_COMMON_AGE_H_
