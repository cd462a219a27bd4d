#include "server/startup/options.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <system_error>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/engine/memory/process_memory.h"
#include "server/rpc/transport/listen_address.h"
#include "server/rpc/transport/tls.h"
#include "server/rpc/transport/tokens.h"
#include "server/startup/config_file.h"
#include "server/startup/exposure.h"
#include "server/startup/flag_checks.h"
#include "server/startup/flag_types.h"
#include "server/startup/group_flags.h"
#include "server/startup/head_entry.h"
#include "server/startup/replica_flags.h"
#include "server/telemetry/http/http_hosts.h"
#include "server/version.h"

ABSL_FLAG(
    std::string, listen, "127.0.0.1:50051",
    "addresses of the gRPC services, with commas: host:port, where port 0 takes a free one, or unix:PATH");
ABSL_FLAG(lossd::GuardFile, tls_certificate, {},
          "PEM file: the certificate that host:port addresses are served with, and intermediate ones; with "
          "it there "
          "is TLS");
ABSL_FLAG(lossd::GuardFile, tls_key, {}, "PEM file: the private key of --tls_certificate");
ABSL_FLAG(lossd::GuardFile, tls_client_ca, {},
          "PEM file: only clients with a certificate of these authorities are served (mTLS)");
ABSL_FLAG(bool, insecure, false,
          "allow --listen beyond loopback without TLS: whoever reaches the port can do everything");
ABSL_FLAG(lossd::GuardFile, tokens, {},
          "file of lines 'ROLE TOKEN [NAME]', ROLE one of read-only, trainer, admin: calls need a token "
          "(authorization: Bearer TOKEN) of a role that may make them; read again when it changes");
ABSL_FLAG(
    std::string, health_listen, "",
    "address of the health service alone, host:port, without TLS and tokens: for probes; port 0 takes a "
    "free one; empty turns it off");
ABSL_FLAG(lossd::Bytes, max_metadata_bytes, lossd::Bytes{8 << 10}, "most bytes of the headers of a call");
ABSL_FLAG(absl::Duration, max_connection_age, absl::InfiniteDuration(),
          "connections older than this, give or take a tenth, are told to end: clients connect anew, and are "
          "looked at by the newest certificates; at least 1s");
ABSL_FLAG(
    absl::Duration, max_connection_age_grace, absl::Minutes(10),
    "calls that are still there so long after that are cut off; a training goes on over a new connection");
ABSL_FLAG(std::string, metrics_listen, "127.0.0.1:9464",
          "address of /metrics and the status page, host:port; port 0 takes a free one; empty turns it off");
ABSL_FLAG(std::string, metrics_hosts, "",
          "names that this port is asked by, with commas, where they are neither addresses, names without a "
          "dot nor names of a cluster: trainer.example.com, *.example.com, or * for any");
ABSL_FLAG(std::string, device, "auto", "where heads live: cpu, cuda:N, or auto: cuda:0 if it can be used");
ABSL_FLAG(
    std::string, devices, "",
    "in the place of --device: a list, cpu or CUDA devices with commas, or all (CUDA devices). More than "
    "one make a group: a process for each, and the vocabulary of every head lies over all of them");
ABSL_FLAG(lossd::Bytes, workspace_bytes, lossd::Bytes{0},
          "ceiling of the memory for rows of logits; more rows are worked on at once, up to a point; 0 takes "
          "512 MiB "
          "on the CPU and 1.25 GiB on a GPU");
ABSL_FLAG(
    lossd::Bytes, memory_limit_bytes, lossd::Bytes{0},
    "what heads and the workspace may reserve in all; 0 takes 90 % of a GPU's free memory; on the CPU what "
    "--staging_bytes and --parking_bytes leave of the memory that is available at start, but for a tenth and "
    "1 GiB at least");
ABSL_FLAG(lossd::Bytes, head_quota_bytes, lossd::Bytes{0},
          "what one head may reserve with all its sessions; 0 takes --memory_limit_bytes");
ABSL_FLAG(
    lossd::Bytes, parking_bytes, lossd::Bytes{0},
    "memory of the host for heads that are put aside while nobody uses them (lossctl head park); 0: none "
    "can be");
ABSL_FLAG(std::string, weights_dir, "",
          "folder of safetensors files that heads may be loaded from, by LoadWeights and by \"weights\" in "
          "--config; nothing outside it is opened");
ABSL_FLAG(lossd::Bytes, max_chunk_bytes, lossd::Bytes{int64_t{16} << 20},
          "largest hidden_states of one chunk, with those of its teacher");
ABSL_FLAG(int64_t, max_chunk_tokens, 65536, "most tokens of one chunk");
ABSL_FLAG(lossd::Bytes, lane_credit_bytes, lossd::Bytes{int64_t{32} << 20},
          "payload in and out that one stream may have under way before the server stops reading from it");
ABSL_FLAG(lossd::Bytes, session_credit_bytes, lossd::Bytes{0},
          "the same for all lanes of one session together; 0 takes that of four lanes");
ABSL_FLAG(
    lossd::Bytes, staging_bytes, lossd::Bytes{0},
    "credits of all sessions, and what streams of rows hold, together; a session or stream that does not fit "
    "is refused with a time to try again; 0 takes a quarter of the memory that is available at start, at "
    "most "
    "64 GiB, and at least 2 GiB or half of it");
ABSL_FLAG(lossd::Bytes, head_staging_bytes, lossd::Bytes{0},
          "the same for the sessions and streams of one head; 0 takes --staging_bytes");
ABSL_FLAG(
    lossd::Bytes, pinned_bytes, lossd::Bytes{int64_t{512} << 20},
    "page-locked memory that a GPU copies payloads and results from and to by itself; beyond it they are "
    "copied once more");
ABSL_FLAG(bool, same_host_regions, false,
          "let clients on this host share memory with the server, so that chunks carry offsets instead of "
          "payloads");
ABSL_FLAG(lossd::Bytes, region_bytes, lossd::Bytes{int64_t{4} << 30}, "memory of all regions together");
ABSL_FLAG(lossd::Bytes, region_client_bytes, lossd::Bytes{0},
          "of one client process; 0 takes --region_bytes");
ABSL_FLAG(absl::Duration, region_attach_timeout, absl::Seconds(10),
          "a region that its client has not attached after this long is dropped");
ABSL_FLAG(std::string, region_socket_dir, "",
          "folder, mode 0700, for the socket over which clients attach regions; empty takes a temporary one");
ABSL_FLAG(absl::Duration, batching_window, absl::ZeroDuration(),
          "how long an idle GPU waits for more chunks before it starts a small batch; at most 1s");
ABSL_FLAG(int64_t, max_heads, 64, "most heads");
ABSL_FLAG(int64_t, max_sessions, 1024, "most open sessions");
ABSL_FLAG(int32_t, max_lanes, 16, "most lanes of one session");
ABSL_FLAG(int64_t, max_streams, 4096, "most streams: Compute, ReadWeights and ReadGradient together");
ABSL_FLAG(absl::Duration, session_lease, absl::Minutes(10),
          "a session without a stream and without a call this long is closed");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Seconds(30),
          "after SIGTERM, calls that are still there after this long are cancelled");
ABSL_FLAG(std::string, checkpoint_dir, "",
          "folder of checkpoints, made with mode 0700 if it is not there; with it, a drain saves every head");
ABSL_FLAG(
    int64_t, checkpoint_keep, 0,
    "after a save with a tag PREFIX-NUMBER, keep the N of this prefix that were saved last and delete the "
    "head's others; 0 keeps all");
ABSL_FLAG(
    int64_t, checkpoint_steps, 0,
    "save a head by itself when the number of its optimizer's steps is a multiple of this, under the "
    "tag auto-STEPS, beside what is computed next, and keep the newest 3 of these if --checkpoint_keep does "
    "not say otherwise; 0: never");
ABSL_FLAG(
    bool, restore, false,
    "start with what --checkpoint_dir has: go on where the last server was drained, or if it was killed, "
    "with every head's newest checkpoint");
ABSL_FLAG(std::string, port_file, "",
          "write the ports as JSON {\"grpc\": N, \"metrics\": N, \"health\": N} to this file once serving; "
          "node 1 of a group over hosts to FILE.1, and so on");
ABSL_FLAG(std::string, log_format, "text", "text or json; one line an event, on standard error");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning or error");
ABSL_FLAG(lossd::GuardFile, config, {},
          absl::StrCat("JSON file: any flag by its name, and \"heads\": [{\"",
                       absl::StrJoin(lossd::HeadKeys(), "\", \""),
                       "\"}] to create at start; the command line wins over it"));

namespace lossd {
namespace {

template <typename Enum>
absl::StatusOr<Enum> Choose(const char* flag, const std::string& value,
                            std::initializer_list<std::pair<const char*, Enum>> choices) {
  std::string names;
  for (const auto& [name, choice] : choices) {
    if (value == name) return choice;
    absl::StrAppend(&names, names.empty() ? "" : ", ", name);
  }
  return Invalid(absl::StrCat("--", flag, " is '", value, "'; it must be one of: ", names));
}

// Whether a host exists is the resolver's to judge, but it takes any number for a port, and what it makes of
// two addresses is neither.
absl::Status CheckAddress(const char* flag, const std::string& address) {
  const auto& [host, port] = rpc::SplitHostPort(address);
  const bool bracketed = absl::StartsWith(address, "[");
  const bool one_host =
      host.find_first_of(", \t[]") == std::string::npos && (bracketed || host.find(':') == std::string::npos);
  if (port >= 0 && port <= 65535 && one_host) return absl::OkStatus();
  return Invalid(absl::StrCat("--", flag, " is '", address,
                              "'; it must be one address, host:port with a port from 0 to 65535"));
}

// --config has to be known before the command line is read over it.
std::string FindConfig(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "--") && !absl::ConsumePrefix(&argument, "-")) continue;
    if (argument == "config" && i + 1 < argc) return argv[i + 1];
    if (absl::ConsumePrefix(&argument, "config=")) return std::string(argument);
  }
  return "";
}

// Checks

absl::Status ReadDeviceOptions(Options& options) {
  options.device.name = absl::GetFlag(FLAGS_device);
  if (!engine::IsDeviceName(options.device.name)) {
    return Invalid(absl::StrCat("--device is '", options.device.name,
                                "'; it must be one of: auto, cpu, cuda:0, cuda:1, ..."));
  }
  const std::string list = absl::GetFlag(FLAGS_devices);
  if (!list.empty() && options.device.name != "auto") {
    return Invalid(absl::StrCat("--device is '", options.device.name, "' and --devices is '", list,
                                "'; only one of them may be there"));
  }
  absl::StatusOr<ReplicaOptions> replicas = ReadReplicaFlags();
  if (!replicas.ok()) return replicas.status();
  options.replicas = *std::move(replicas);
  absl::StatusOr<GroupOptions> group = ReadGroupFlags(list, options.replicas.place.shared());
  if (!group.ok()) return group.status();
  options.group = *std::move(group);
  if (!list.empty()) options.device.name = options.group.own_device();
  return absl::OkStatus();
}

// Clients of other replicas are sent here by address.
absl::Status CheckReachable(const Options& options) {
  if (!options.replicas.place.shared()) return absl::OkStatus();
  for (const std::string& address : std::vector<std::string>(absl::StrSplit(options.server.listen, ','))) {
    if (!rpc::IsUnixSocket(address)) return absl::OkStatus();
  }
  return Invalid(absl::StrCat("--listen is '", options.server.listen,
                              "', and --replica_set is given; it needs a host:port, by which clients that "
                              "have asked another replica come here"));
}

// The value for --staging_bytes=0.
absl::StatusOr<int64_t> StagingBytesFor(const engine::EngineOptions& engine) {
  const int64_t available = std::max<int64_t>(0, engine::AvailableMemory() - engine.parking_bytes);
  const int64_t bytes = engine::DefaultStagingBytes(available);
  const int64_t least = std::max(engine.lane_credit_bytes, engine.session_credit_bytes);
  if (bytes >= least) return bytes;
  const std::string bound = engine::MemoryBound();
  return Invalid(absl::StrCat("too little memory is available: ", available, " bytes beside --parking_bytes",
                              bound.empty() ? "" : absl::StrCat(", by the limit of ", bound),
                              ", and half of it is less than the ", least,
                              " bytes that staging needs; give lossd more memory, or lower "
                              "--lane_credit_bytes and --session_credit_bytes"));
}

absl::Status ReadEngineOptions(Options& options) {
  engine::EngineOptions& engine = options.engine;
  const int64_t kMaxChunk = int64_t{512} << 20;  // twice this, and some, is the 2 GiB that a message may have
  engine.chunk_limits.max_chunk_bytes = absl::GetFlag(FLAGS_max_chunk_bytes).value;
  engine.chunk_limits.max_chunk_tokens = absl::GetFlag(FLAGS_max_chunk_tokens);
  engine.lane_credit_bytes = absl::GetFlag(FLAGS_lane_credit_bytes).value;
  engine.session_credit_bytes = absl::GetFlag(FLAGS_session_credit_bytes).value;
  engine.parking_bytes = absl::GetFlag(FLAGS_parking_bytes).value;
  engine.staging_bytes = absl::GetFlag(FLAGS_staging_bytes).value;
  if (engine.staging_bytes == 0) {
    const absl::StatusOr<int64_t> bytes = StagingBytesFor(engine);
    if (!bytes.ok()) return bytes.status();
    engine.staging_bytes = *bytes;
  }
  engine.head_staging_bytes = absl::GetFlag(FLAGS_head_staging_bytes).value;
  engine.head_quota_bytes = absl::GetFlag(FLAGS_head_quota_bytes).value;
  engine.max_streams = absl::GetFlag(FLAGS_max_streams);
  engine.max_heads = absl::GetFlag(FLAGS_max_heads);
  engine.max_sessions = absl::GetFlag(FLAGS_max_sessions);
  engine.max_lanes = absl::GetFlag(FLAGS_max_lanes);
  engine.session_lease = absl::GetFlag(FLAGS_session_lease);
  engine.batching_window = absl::GetFlag(FLAGS_batching_window);
  engine.memory_limit_bytes = absl::GetFlag(FLAGS_memory_limit_bytes).value;
  options.device.workspace_bytes = absl::GetFlag(FLAGS_workspace_bytes).value;
  options.device.staging_bytes = engine.staging_bytes + engine.parking_bytes;
  options.device.pinned_bytes = absl::GetFlag(FLAGS_pinned_bytes).value;
  options.device.chunk_limits = engine.chunk_limits;
  for (const auto& [flag, value, least] : std::initializer_list<std::tuple<const char*, int64_t, int64_t>>{
           {"memory_limit_bytes", engine.memory_limit_bytes, 0},
           {"head_quota_bytes", engine.head_quota_bytes, 0},
           {"parking_bytes", engine.parking_bytes, 0},
           {"max_chunk_bytes", engine.chunk_limits.max_chunk_bytes, 4096},
           {"max_chunk_tokens", engine.chunk_limits.max_chunk_tokens, 1},
           {"lane_credit_bytes", engine.lane_credit_bytes, 4096},
           {"staging_bytes", engine.staging_bytes,
            std::max(engine.lane_credit_bytes, engine.session_credit_bytes)},
           {"pinned_bytes", options.device.pinned_bytes, 0},
           {"max_streams", engine.max_streams, 1},
           {"max_heads", engine.max_heads, 1},
           {"max_sessions", engine.max_sessions, 1},
           {"max_lanes", engine.max_lanes, 1}}) {
    if (absl::Status status = CheckAtLeast(flag, value, least); !status.ok()) return status;
  }
  if (engine.session_credit_bytes != 0) {
    if (absl::Status status =
            CheckAtLeast("session_credit_bytes", engine.session_credit_bytes, engine.lane_credit_bytes);
        !status.ok()) {
      return status;
    }
  }
  if (engine.head_staging_bytes != 0) {
    // Otherwise no session would ever be opened.
    const int64_t least = std::max(engine.lane_credit_bytes, engine.session_credit_bytes);
    absl::Status status = CheckAtLeast("head_staging_bytes", engine.head_staging_bytes, least);
    if (!status.ok()) return status;
  }
  if (options.device.workspace_bytes != 0) {
    if (absl::Status status =
            CheckAtLeast("workspace_bytes", options.device.workspace_bytes, int64_t{1} << 20);
        !status.ok()) {
      return status;
    }
  }
  if (engine.chunk_limits.max_chunk_bytes > kMaxChunk) {
    return Invalid(absl::StrCat("--max_chunk_bytes is ", engine.chunk_limits.max_chunk_bytes,
                                "; it must be at most ", kMaxChunk));
  }
  if (engine.chunk_limits.max_chunk_tokens > (int64_t{1} << 22)) {
    return Invalid(absl::StrCat("--max_chunk_tokens is ", engine.chunk_limits.max_chunk_tokens,
                                "; it must be at most ", int64_t{1} << 22));
  }
  if (engine.batching_window < absl::ZeroDuration() || engine.batching_window > absl::Seconds(1)) {
    return Invalid(absl::StrCat("--batching_window is ", absl::FormatDuration(engine.batching_window),
                                "; it must be from 0 to 1s"));
  }
  return CheckDuration("session_lease", engine.session_lease, absl::Seconds(1));
}

// After those of TLS.
absl::Status ReadAccessOptions(Options& options) {
  options.tokens = absl::GetFlag(FLAGS_tokens).name;
  options.health_listen = absl::GetFlag(FLAGS_health_listen);
  options.exposure = {
      .listen = options.server.listen,
      .tls = options.server.tls,
      .tokens = !options.tokens.empty(),
      .plain_text = absl::GetFlag(FLAGS_insecure) ? PlainText::kAnywhere : PlainText::kLoopbackOnly};
  if (absl::Status status = CheckExposure(options.exposure); !status.ok()) return status;
  if (!options.tokens.empty()) {
    if (const auto read = rpc::ReadTokens(options.tokens); !read.ok()) return read.status();
  }
  if (!options.health_listen.empty()) {
    if (absl::Status status = CheckAddress("health_listen", options.health_listen); !status.ok()) {
      return status;
    }
  }
  rpc::ConnectionLimits& limits = options.server.connections;
  limits.max_metadata_bytes = absl::GetFlag(FLAGS_max_metadata_bytes).value;
  limits.max_age = absl::GetFlag(FLAGS_max_connection_age);
  limits.max_age_grace = absl::GetFlag(FLAGS_max_connection_age_grace);
  if (limits.max_metadata_bytes < 1024 || limits.max_metadata_bytes > (1 << 20)) {
    return Invalid(absl::StrCat("--max_metadata_bytes is ", limits.max_metadata_bytes,
                                "; it must be from 1024 to 1048576"));
  }
  for (const auto& [flag, value] : {std::pair("max_connection_age", limits.max_age),
                                    std::pair("max_connection_age_grace", limits.max_age_grace)}) {
    if (absl::Status status = CheckDuration(flag, value, absl::Seconds(1)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ReadMetricsOptions(Options& options) {
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  if (!options.metrics_listen.empty()) {
    absl::Status status = CheckAddress("metrics_listen", options.metrics_listen);
    if (!status.ok()) return status;
  }
  absl::StatusOr<telemetry::HttpHosts> hosts = telemetry::HttpHosts::Parse(
      rpc::SplitHostPort(options.metrics_listen).host, absl::GetFlag(FLAGS_metrics_hosts));
  if (!hosts.ok()) return Invalid(absl::StrCat("--metrics_hosts: ", hosts.status().message()));
  options.metrics_hosts = *std::move(hosts);
  return absl::OkStatus();
}

absl::Status ReadRegionOptions(Options& options) {
  options.server.region_socket_dir = absl::GetFlag(FLAGS_region_socket_dir);
  engine::RegionLimits& regions = options.engine.regions;
  const int64_t bytes = absl::GetFlag(FLAGS_region_bytes).value;
  const int64_t client_bytes = absl::GetFlag(FLAGS_region_client_bytes).value;
  regions.attach_timeout = absl::GetFlag(FLAGS_region_attach_timeout);
  if (absl::Status status = CheckAtLeast("region_bytes", bytes, 4096); !status.ok()) return status;
  if (absl::Status status = CheckAtLeast("region_client_bytes", client_bytes, 0); !status.ok()) return status;
  if (bytes > (int64_t{1} << 50)) return Invalid("--region_bytes must be at most 2^50");
  if (absl::Status status = CheckDuration("region_attach_timeout", regions.attach_timeout, absl::Seconds(1));
      !status.ok()) {
    return status;
  }
  if (!absl::GetFlag(FLAGS_same_host_regions)) return absl::OkStatus();
  regions.total_bytes = bytes;
  regions.client_bytes = client_bytes == 0 ? bytes : client_bytes;
  return absl::OkStatus();
}

absl::Status ReadWeightOptions(Options& options) {
  options.server.weights_dir = absl::GetFlag(FLAGS_weights_dir);
  std::error_code ignored;
  if (!options.server.weights_dir.empty()) {
    if (std::filesystem::is_directory(options.server.weights_dir, ignored)) return absl::OkStatus();
    return Invalid(absl::StrCat("--weights_dir is '", options.server.weights_dir,
                                "'; it must be a folder that is there"));
  }
  for (const HeadEntry& head : options.heads) {
    if (head.weights.empty()) continue;
    return Invalid(absl::StrCat("--config: head ", head.config.name, " has weights '", head.weights,
                                "', which needs --weights_dir"));
  }
  return absl::OkStatus();
}

absl::Status ReadLogOptions(Options& options) {
  const absl::StatusOr<telemetry::LogFormat> format = Choose<telemetry::LogFormat>(
      "log_format", absl::GetFlag(FLAGS_log_format),
      {{"text", telemetry::LogFormat::kText}, {"json", telemetry::LogFormat::kJson}});
  if (!format.ok()) return format.status();
  const absl::StatusOr<telemetry::LogLevel> level =
      Choose<telemetry::LogLevel>("log_level", absl::GetFlag(FLAGS_log_level),
                                  {{"debug", telemetry::LogLevel::kDebug},
                                   {"info", telemetry::LogLevel::kInfo},
                                   {"warning", telemetry::LogLevel::kWarning},
                                   {"error", telemetry::LogLevel::kError}});
  if (!level.ok()) return level.status();
  options.log_format = *format;
  options.log_level = *level;
  return absl::OkStatus();
}

// What one rank could not do otherwise than another without harm. Where one command line starts all, they do.
std::map<std::string, std::string> WhatRanksAgreeOn(const Options& options) {
  return {{"rank_timeout", absl::FormatDuration(options.group.rank_timeout)},
          {"workspace_bytes", absl::StrCat(options.device.workspace_bytes)},
          {"max_chunk_bytes", absl::StrCat(options.device.chunk_limits.max_chunk_bytes)},
          {"max_chunk_tokens", absl::StrCat(options.device.chunk_limits.max_chunk_tokens)}};
}

// The flags library ends a process that was asked for help with status 1, and knows no -h.
bool IsHelp(absl::string_view argument) { return argument == "-h" || argument == "--help"; }
void PrintHelp(char* name) {
  std::atexit([] {
    std::cout.flush();
    std::_Exit(0);
  });
  std::string help = "--help";
  std::array<char*, 2> arguments = {name, help.data()};
  absl::ParseCommandLine(arguments.size(), arguments.data());
}

// The library ends the process with status 1 at a flag that does not exist, or a value that is none for it.
std::vector<char*> ParseCommandLine(int argc, char** argv) {
  static bool parsing = false;
  parsing = true;
  on_exit(
      [](int status, void* /*argument*/) {
        if (!parsing || status != EXIT_FAILURE) return;
        std::cout.flush();
        std::cerr << "lossd: see lossd --help\n";  // not buffered
        std::_Exit(kUsageError);
      },
      nullptr);
  std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  parsing = false;
  return rest;
}

}  // namespace

absl::StatusOr<Options> ReadOptions(int argc, char** argv) {
  absl::FlagsUsageConfig usage;
  // --help shows our flags, not those of libraries.
  usage.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "server/startup/options.cc") ||
           absl::EndsWith(file, "server/startup/group_flags.cc") ||
           absl::EndsWith(file, "server/startup/replica_flags.cc");
  };
  usage.normalize_filename = [](absl::string_view file) {
    const size_t start = file.rfind("server/");
    return std::string(start == absl::string_view::npos ? file : file.substr(start));
  };
  usage.contains_helpshort_flags = usage.contains_help_flags;
  usage.version_string = [] { return absl::StrCat("lossd ", kVersion, "\n"); };
  absl::SetFlagsUsageConfig(usage);
  absl::SetProgramUsageMessage(
      "keeps lm_head weights and their gradients, and answers hidden states with losses and input "
      "gradients.\n\n"
      "  lossd                                     serve on 127.0.0.1:50051, metrics on 127.0.0.1:9464\n"
      "  lossd --listen=127.0.0.1:0 --port_file=p  take free ports and write them to p\n"
      "  lossd --listen=0.0.0.0:50051,unix:/run/lossd.sock --tls_certificate=server.pem --tls_key=server.key "
      "--tls_client_ca=ca.pem\n"
      "                                            TLS for clients with a certificate of ours, and a socket "
      "file\n"
      "  lossd --listen=0.0.0.0:50051 --tls_certificate=server.pem --tls_key=server.key --tokens=tokens "
      "--health_listen=0.0.0.0:50052\n"
      "                                            TLS, tokens with roles, and a port for probes\n"
      "  lossd --devices=cpu,cpu                   every head over two ranks: docs/scale-out.md\n"
      "  lossd --devices=all --group=flags --group_nodes=2 --group_node=1 --group_leader=node-0.example "
      "--group_token_file=token --collective_network=trusted --collective_interface=eth0\n"
      "                                            the second of two hosts: one head over the GPUs of both\n"
      "  lossd --replica_set=main --replicas=2 --replica=1 --replica_leader=node-0.example "
      "--group_token_file=token --collective_network=trusted --collective_interface=eth0\n"
      "                                            the second of two servers that train one head\n"
      "  lossd --config=lossd.json                 flags and heads from a file\n"
      "  lossd --checkpoint_dir=/var/lib/lossd --restore\n"
      "                                            go on where the last one stopped: sessions and gradients "
      "too\n\n"
      "SIGTERM and SIGINT drain: what was accepted is finished and, with --checkpoint_dir, saved; then the "
      "exit status is 0.");

  if (argc == 2 && IsHelp(argv[1])) PrintHelp(argv[0]);

  Options options;
  if (const std::string config = FindConfig(argc, argv); !config.empty()) {  // empty: refused below
    absl::StatusOr<std::vector<HeadEntry>> heads = ReadConfigFile(config);
    if (!heads.ok()) return heads.status();
    options.heads = *std::move(heads);
  }
  const std::vector<char*> rest = ParseCommandLine(argc, argv);
  if (rest.size() > 1) return Invalid(absl::StrCat("'", rest[1], "' is not a flag; see --help"));

  if (absl::Status status = ReadDeviceOptions(options); !status.ok()) return status;
  options.server.listen = absl::GetFlag(FLAGS_listen);
  if (const auto addresses = rpc::ParseListen(options.server.listen); !addresses.ok()) {
    return addresses.status();
  }
  if (absl::Status reachable = CheckReachable(options); !reachable.ok()) return reachable;
  options.server.tls = {.certificate = absl::GetFlag(FLAGS_tls_certificate).name,
                        .key = absl::GetFlag(FLAGS_tls_key).name,
                        .client_ca = absl::GetFlag(FLAGS_tls_client_ca).name};
  if (const auto check = rpc::CheckTls(options.server.tls); !check.ok()) return check.status();
  if (absl::Status status = ReadAccessOptions(options); !status.ok()) return status;
  if (absl::Status status = ReadMetricsOptions(options); !status.ok()) return status;
  absl::StatusOr<LanePlace> lanes =
      ReadLaneFlags(options.group, options.server.listen,
                    {options.metrics_listen, options.health_listen, options.replicas.leader});
  if (!lanes.ok()) return lanes.status();
  options.lanes = *std::move(lanes);
  options.leader_place = absl::StrCat("the leader (rank 0, --listen=", options.server.listen, ")");
  options.port_file = absl::GetFlag(FLAGS_port_file);
  options.drain_timeout = absl::GetFlag(FLAGS_drain_timeout);
  if (absl::Status status = CheckDuration("drain_timeout", options.drain_timeout, absl::ZeroDuration());
      !status.ok()) {
    return status;
  }
  options.checkpoint_dir = absl::GetFlag(FLAGS_checkpoint_dir);
  options.restore = absl::GetFlag(FLAGS_restore);
  if (options.restore && options.checkpoint_dir.empty()) {
    return Invalid("--restore is true; it needs --checkpoint_dir, the folder to restore from");
  }
  options.engine.checkpoint_keep = absl::GetFlag(FLAGS_checkpoint_keep);
  if (absl::Status status = CheckAtLeast("checkpoint_keep", options.engine.checkpoint_keep, 0);
      !status.ok()) {
    return status;
  }
  if (options.engine.checkpoint_keep > 0 && options.checkpoint_dir.empty()) {
    return Invalid(absl::StrCat("--checkpoint_keep is ", options.engine.checkpoint_keep,
                                "; it needs --checkpoint_dir, the folder that the checkpoints are in"));
  }
  options.engine.checkpoint_steps = absl::GetFlag(FLAGS_checkpoint_steps);
  if (absl::Status status = CheckAtLeast("checkpoint_steps", options.engine.checkpoint_steps, 0);
      !status.ok()) {
    return status;
  }
  if (options.engine.checkpoint_steps > 0 && options.checkpoint_dir.empty()) {
    return Invalid(absl::StrCat("--checkpoint_steps is ", options.engine.checkpoint_steps,
                                "; it needs --checkpoint_dir, the folder to save to"));
  }
  if (absl::Status status = ReadLogOptions(options); !status.ok()) return status;
  if (absl::Status status = ReadEngineOptions(options); !status.ok()) return status;
  if (absl::Status status = ReadWeightOptions(options); !status.ok()) return status;
  if (absl::Status status = ReadRegionOptions(options); !status.ok()) return status;
  options.group.agreed = WhatRanksAgreeOn(options);
  return options;
}

}  // namespace lossd
