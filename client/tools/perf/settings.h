// What one run of lossd-perf is to do.
#ifndef LOSSD_CLIENT_TOOLS_PERF_SETTINGS_H_
#define LOSSD_CLIENT_TOOLS_PERF_SETTINGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "client/tools/connection_options.h"
#include "client/tools/perf/pacer.h"
#include "lossd/client.h"
#include "nlohmann/json_fwd.hpp"

namespace lossd::perf {

// Part of the interface: scripts depend on the numbers (docs/lossd-perf.md).
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,       // a call failed or a result was wrong
  kUsage = 2,        // bad arguments
  kUnreachable = 3,  // no server
};
std::string ExitCodesHelp();

enum class Transport { kTcp, kUnix, kTls, kShm, kCudaIpc };

struct Settings {
  std::string target;   // empty: a server of its own
  std::string metrics;  // host:port; empty: none, or that of its own server
  std::string device = "auto";
  std::string devices;   // of a server of its own, beside one of the first of them; empty: `device` alone
  int64_t replicas = 1;  // servers that share `devices` out, and hold replicas of the head
  int64_t rounds = 3;    // in which the two are measured in turns
  Transport transport = Transport::kTcp;  // of a server of its own
  tools::ConnectionOptions connection;    // of `target`
  std::vector<std::string> server_flags;

  int64_t tokens = 1024;
  int64_t vocab = 32768;
  int64_t hidden = 512;
  DataType weight_type = DataType::kBFloat16;
  DataType hidden_type = DataType::kBFloat16;
  DataType dx_type = DataType::kBFloat16;
  ComputeMode mode = ComputeMode::kLossAndGradients;
  int64_t chunk_bytes = 0;
  int64_t lanes = 0;  // of each session
  double ignored = 0;
  LossOptions loss = {};

  int64_t clients = 1;
  Amount amount = {.duration = 10};
  int64_t warm_up = 2;
  double rate = 0;  // 0: closed loop
  uint64_t seed = 1;
  double timeout = 10;
  int64_t flushes = 0;  // how often the gradient is read in the end, of each dtype
};

// Every option but --transport, --devices, the lists of a sweep and how results are printed.
void AddServerOptions(CLI::App& app, Settings& settings);
void AddLoadOptions(CLI::App& app, Settings& settings);
// --devices, --replicas and --rounds.
void AddDevicesOptions(CLI::App& app, Settings& settings);
// --transport, which --target excludes: into `transports`, of which there is one unless a delimiter is set.
CLI::Option* AddTransportOption(CLI::App& app, std::vector<Transport>& transports, CLI::Option& target);
// --tokens, --clients, --chunk_bytes and --lanes.
void AddSizeOptions(CLI::App& app, Settings& settings);

// The first of settings.devices.
std::string FirstDevice(const Settings& settings);
// Those of each replica, in their order, as --devices has them.
std::vector<std::string> DevicesOfReplicas(const Settings& settings);

// Empty, or what does not go together.
std::string Problem(const Settings& settings);

// What every session of a run is opened with.
SessionOptions SessionOptionsOf(const Settings& settings);

// "tcp", "uds", "tls", "shm" or "cuda_ipc": how the server of this run is reached.
const char* TransportName(const Settings& settings);

nlohmann::ordered_json ToJson(const Settings& settings);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_SETTINGS_H_
