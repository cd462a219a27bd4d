// The files that say who is let in (TLS and tokens): what they were at the start, and what became of them.
#ifndef LOSSD_SERVER_STARTUP_ACCESS_WATCH_H_
#define LOSSD_SERVER_STARTUP_ACCESS_WATCH_H_

#include <functional>
#include <memory>
#include <optional>

#include "server/rpc/transport/access.h"
#include "server/rpc/transport/file_watch.h"
#include "server/rpc/transport/tls.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd {

// Logs and counts. Not thread-safe.
class AccessWatch {
 public:
  // `access` is null if no token is asked for. `counters` outlives this.
  AccessWatch(const rpc::TlsFiles& tls, std::shared_ptr<rpc::AccessControl> access,
              telemetry::ServiceCounters* counters);

  void LogStart();
  // Once a second or so: reads what has changed. `on_tokens` is called after the tokens have: streams whose
  // token is gone are to end.
  using OnTokens = std::function<void()>;
  void Poll(const OnTokens& on_tokens);
  // Somebody asks for it: reads everything, and logs what it found, changed or not.
  void Reload(const OnTokens& on_tokens);

 private:
  void PollTls(rpc::Look look);
  void PollTokens(rpc::Look look, const OnTokens& on_tokens);
  void TakeTls(rpc::TlsCheck check, const char* event);

  const rpc::TlsFiles tls_files_;
  const std::shared_ptr<rpc::AccessControl> access_;  // null: no token is asked for
  telemetry::AccessCounters& counters_;
  rpc::TlsWatch tls_;
  std::optional<rpc::TlsCheck> last_tls_;  // the last that was good
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_ACCESS_WATCH_H_
