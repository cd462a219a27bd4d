// The server's flags, checked and in the units of the code.
#ifndef LOSSD_SERVER_STARTUP_OPTIONS_H_
#define LOSSD_SERVER_STARTUP_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/device/device_factory.h"
#include "server/engine/engine.h"
#include "server/rpc/server_options.h"
#include "server/startup/exposure.h"
#include "server/startup/group/group_options.h"
#include "server/startup/group/lane_place.h"
#include "server/startup/head_entry.h"
#include "server/startup/replicas/replica_options.h"
#include "server/telemetry/common/logging.h"
#include "server/telemetry/http/http_hosts.h"

namespace lossd {

// The exit status after a mistake in the command line or the configuration file.
inline constexpr int kUsageError = 2;

struct Options {
  rpc::ServerOptions server;
  std::string metrics_listen;  // empty: no metrics
  telemetry::HttpHosts metrics_hosts;
  std::string health_listen;  // empty: no port for health alone
  std::string tokens;         // file of tokens; empty: none is asked for
  Exposure exposure;          // of server.listen; checked
  std::string port_file;
  engine::DeviceOptions device;  // in a group, this rank's
  GroupOptions group;
  ReplicaOptions replicas;
  LanePlace lanes;           // in a group, this rank's
  std::string leader_place;  // how errors at a rank call the leader
  engine::EngineOptions engine;
  absl::Duration drain_timeout;
  std::string checkpoint_dir;  // empty: no checkpoints
  bool restore = false;        // from that folder
  telemetry::LogFormat log_format = telemetry::LogFormat::kText;
  telemetry::LogLevel log_level = telemetry::LogLevel::kInfo;
  std::vector<HeadEntry> heads;  // of the configuration file, created at start
};

// Reads the command line, and the file of --config beneath it: what the command line says wins. Prints help
// and exits for --help and --version, and exits with kUsageError where a value is none for its flag.
// INVALID_ARGUMENT naming the flag, its value and what it may be.
absl::StatusOr<Options> ReadOptions(int argc, char** argv);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_OPTIONS_H_
