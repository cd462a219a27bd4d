// A lossd of one's own, on free loopback ports or a socket file, for as long as the object lives.
#ifndef LOSSD_CLIENT_TOOLS_PERF_SERVER_PROCESS_H_
#define LOSSD_CLIENT_TOOLS_PERF_SERVER_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/tools/perf/settings.h"
#include "lossd/client.h"

namespace lossd::perf {

// Seconds of processor time so far of a process and those that it has started from its main thread and that
// live; negative if it is not there.
double CpuSecondsOf(pid_t pid);
double OwnCpuSeconds();

// The path of a file in the folder that this program lies in.
std::string BesideThisProgram(const std::string& name);

// Ends the servers of this program, at most two, at once. Safe in a signal handler.
void KillOwnServer();

class ServerProcess {
 public:
  // Starts the lossd beside this program and waits until it serves. The error has the end of its log.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const Settings& settings);
  ~ServerProcess();  // stops it
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& target() const { return target_; }
  const std::optional<TlsOptions>& tls() const { return tls_; }
  const std::string& metrics() const { return metrics_; }
  pid_t pid() const { return pid_; }

 private:
  explicit ServerProcess(std::string folder) : folder_(std::move(folder)) {}
  absl::Status MakeCertificate();
  absl::Status Spawn(const Settings& settings);
  absl::Status AwaitPorts();
  absl::Status Failure(const std::string& what) const;
  bool Ended();

  const std::string folder_;
  std::string target_;
  std::string metrics_;
  std::optional<TlsOptions> tls_;
  pid_t pid_ = -1;
};

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_SERVER_PROCESS_H_
