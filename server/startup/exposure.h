// Who can reach what the server listens on, and whether that was meant.
#ifndef LOSSD_SERVER_STARTUP_EXPOSURE_H_
#define LOSSD_SERVER_STARTUP_EXPOSURE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/rpc/transport/tls.h"

namespace lossd {

// Whether plain text may go beyond this machine (--insecure).
enum class PlainText { kLoopbackOnly, kAnywhere };

struct Exposure {
  std::string listen;
  rpc::TlsFiles tls;
  bool tokens = false;
  PlainText plain_text = PlainText::kLoopbackOnly;
};

// INVALID_ARGUMENT naming the ways out: plain text beyond loopback that was not asked for, tokens that would
// travel in it, and tokens in plain text on an address of loopback that gRPC takes no local calls on.
absl::Status CheckExposure(const Exposure& exposure);

// One sentence for each thing that somebody should know who listens on such addresses.
struct ExposureWarning {
  std::string event;
  std::string listen;
  std::string remedy;
};
std::vector<ExposureWarning> WarningsOf(const Exposure& exposure);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_EXPOSURE_H_
