// The files that say who is let in (TLS and tokens): what they were at the start, and what became of them.
#ifndef LOSSD_SERVER_STARTUP_ACCESS_WATCH_H_
#define LOSSD_SERVER_STARTUP_ACCESS_WATCH_H_

#include <optional>

#include "server/rpc/server.h"
#include "server/rpc/transport/file_watch.h"
#include "server/rpc/transport/tls.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd {

// Logs and counts. Not thread-safe.
class AccessWatch {
 public:
  // Both outlive this; `options` are the server's.
  AccessWatch(const rpc::ServerOptions& options, telemetry::ServiceCounters* counters);

  void LogStart();
  // Once a second or so: reads what has changed. Streams whose token is gone end.
  void Poll(rpc::Server& server);
  // Somebody asks for it: reads everything, and logs what it found, changed or not.
  void Reload(rpc::Server& server);

 private:
  void PollTls(rpc::Look look);
  void PollTokens(rpc::Look look, rpc::Server& server);
  void TakeTls(rpc::TlsCheck check, const char* event);

  const rpc::ServerOptions& options_;
  telemetry::AccessCounters& counters_;
  rpc::TlsWatch tls_;
  std::optional<rpc::TlsCheck> last_tls_;  // the last that was good
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_ACCESS_WATCH_H_
