// A lossd of one's own, on free loopback ports or a socket file, for as long as the object lives.
#ifndef LOSSD_CLIENT_TOOLS_PERF_SERVER_PROCESS_H_
#define LOSSD_CLIENT_TOOLS_PERF_SERVER_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/perf/settings.h"
#include "lossd/client.h"

namespace lossd::perf {

// Seconds of processor time so far of processes and those that they have started from their main threads and
// that live.
double CpuSecondsOf(const std::vector<pid_t>& pids);
double OwnCpuSeconds();

// The path of a file in the folder that this program lies in.
std::string BesideThisProgram(const std::string& name);

// Ends the servers of this program, of at most two ServerProcess, at once. Safe in a signal handler.
void KillOwnServer();

class ServerProcess {
 public:
  // Starts the lossd beside this program, or as many as there are to be replicas, and waits until it serves.
  // The error has the end of its log.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const Settings& settings);
  ~ServerProcess();  // stops it
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& target() const { return target_; }
  const std::optional<TlsOptions>& tls() const { return tls_; }
  const std::string& metrics() const { return metrics_; }
  const std::vector<pid_t>& pids() const { return pids_; }

 private:
  explicit ServerProcess(std::string folder) : folder_(std::move(folder)) {}
  absl::Status MakeCertificate();
  absl::Status Spawn(const Settings& settings);
  std::vector<std::string> CommandOf(const Settings& settings) const;
  // The flags of each replica beside those that all have; none of them if there is one server.
  absl::StatusOr<std::vector<std::vector<std::string>>> ReplicaFlags(const Settings& settings) const;
  absl::Status SpawnOne(std::vector<std::string> command);
  absl::Status AwaitPorts();
  absl::Status Failure(const std::string& what) const;
  // Whether any, or all, of them are gone.
  bool AnyEnded();
  bool AllEnded();

  const std::string folder_;
  std::string target_;
  std::string metrics_;
  std::optional<TlsOptions> tls_;
  std::vector<pid_t> pids_;  // -1: it has ended
};

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_SERVER_PROCESS_H_
