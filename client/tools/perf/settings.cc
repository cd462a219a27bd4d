#include "client/tools/perf/settings.h"

#include <cstddef>
#include <map>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/tools/names.h"
#include "nlohmann/json.hpp"

namespace lossd::perf {
namespace {

void AddTypeOption(CLI::App& app, const std::string& name, const std::string& help,
                   const std::vector<DataType*>& types) {
  app.add_option_function<std::string>(
         name,
         [types](const std::string& value) {
           for (DataType* type : types) *type = DataTypeNames().at(value);
         },
         help)
      ->type_name("fp32|bf16|fp16")
      ->check(CLI::IsMember(DataTypeNames()).description(""))
      ->group("Head and data");
}

constexpr int64_t kMost = int64_t{1} << 40;

void AddLossOptions(CLI::App& app, LossOptions& loss) {
  constexpr char kGroup[] = "Loss";
  app.add_option("--label_smoothing", loss.label_smoothing, "Share of the loss that all tokens get evenly")
      ->check(CLI::Range(0.0, 1.0))
      ->group(kGroup);
  app.add_option("--lse_square_scale", loss.lse_square_scale, "Scale of the z-loss")
      ->check(CLI::Range(0.0, 1e6))
      ->group(kGroup);
  app.add_option("--softcap", loss.softcap, "c of c tanh(logit / c); 0: none")
      ->check(CLI::Range(0.0, 1e6))
      ->group(kGroup);
  app.add_option("--logit_scale", loss.logit_scale, "What logits are multiplied by")
      ->check(CLI::Range(1e-6, 4.0))
      ->group(kGroup);
}

}  // namespace

std::string ExitCodesHelp() {
  return "Exit codes: 0 done; 1 a call failed or a result was wrong; 2 bad arguments; 3 cannot connect to, "
         "or "
         "start, a server.";
}

void AddServerOptions(CLI::App& app, Settings& settings) {
  constexpr char kGroup[] = "Server";
  auto* const target =
      app.add_option("--target", settings.target,
                     "A running lossd, HOST:PORT or unix:PATH; without it, lossd-perf starts "
                     "the lossd that lies beside it and stops it in the end")
          ->group(kGroup);
  app.add_option("--metrics", settings.metrics,
                 "HOST:PORT of that server's Prometheus endpoint: its time in each stage is reported as well")
      ->needs(target)
      ->group(kGroup);
  app.add_option("--device", settings.device, "Device of a server of its own: cpu, cuda:N or auto")
      ->excludes(target)
      ->capture_default_str()
      ->group(kGroup);
  tools::AddConnectionOptions(app, settings.connection, kGroup);
  for (const char* name : {"--tls_ca", "--tls_certificate", "--tls_key", "--tls_server_name", "--token_file",
                           "--token_over_plain_text"}) {
    app.get_option(name)->needs(target);
  }
  app.add_option("--server_flag", settings.server_flags,
                 "A flag for a server of its own, as in --server_flag=--staging_bytes=4G; repeatable")
      ->excludes(target)
      ->group(kGroup);
  app.add_option("--timeout", settings.timeout, "Seconds to wait for a server that does not answer")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str()
      ->group(kGroup);
}

void AddDevicesOptions(CLI::App& app, Settings& settings) {
  auto* const devices =
      app.add_option(
             "--devices", settings.devices,
             "Devices of a server of its own, as its flag has them: cuda:0,cuda:1 or cpu,cpu or all. It is "
             "measured beside a server on the first of them alone, in turns")
          ->type_name("LIST")
          ->excludes(app.get_option("--device"))
          ->excludes(app.get_option("--target"))
          ->group("Server");
  app.add_option("--replicas", settings.replicas,
                 "With --devices, of which each gets as many: servers that hold replicas of the head, in the "
                 "place of one; clients are spread over them")
      ->check(CLI::Range(1, 8))
      ->needs(devices)
      ->capture_default_str()
      ->group("Server");
  app.add_option("--rounds", settings.rounds,
                 "With --devices: how often each is measured; medians are compared")
      ->check(CLI::Range(1, 1000))
      ->needs(devices)
      ->capture_default_str()
      ->group("Load");
}

std::string FirstDevice(const Settings& settings) {
  return settings.devices == "all" ? "cuda:0" : settings.devices.substr(0, settings.devices.find(','));
}

std::vector<std::string> DevicesOfReplicas(const Settings& settings) {
  const std::vector<std::string> all = absl::StrSplit(settings.devices, ',');
  const size_t each = all.size() / static_cast<size_t>(settings.replicas);
  std::vector<std::string> shares;
  for (auto first = all.begin(); each > 0 && first + static_cast<std::ptrdiff_t>(each) <= all.end();
       first += static_cast<std::ptrdiff_t>(each)) {
    shares.push_back(absl::StrJoin(first, first + static_cast<std::ptrdiff_t>(each), ","));
  }
  return shares;
}

CLI::Option* AddTransportOption(CLI::App& app, std::vector<Transport>& transports, CLI::Option& target) {
  static const auto& names = *new std::map<std::string, Transport>{
      {"tcp", Transport::kTcp}, {"uds", Transport::kUnix}, {"unix", Transport::kUnix},
      {"tls", Transport::kTls}, {"shm", Transport::kShm},  {"cuda_ipc", Transport::kCudaIpc}};
  // Not a transformer, which would leave numbers where the command line is shown again (sweep.md).
  return app
      .add_option_function<std::vector<std::string>>(
          "--transport",
          [&transports](const std::vector<std::string>& values) {
            transports.clear();
            for (const std::string& value : values) transports.push_back(names.at(value));
          },
          "How a server of its own is reached: tcp (loopback), uds (a socket file), tls (loopback, with a "
          "certificate made by the openssl program for the run); tcp with hidden states and dX in shared "
          "memory: shm, or in the GPU's: cuda_ipc")
      ->check(CLI::IsMember(names).description(""))
      ->type_name("tcp|uds|tls|shm|cuda_ipc")
      ->default_str("tcp")
      ->excludes(&target)
      ->group("Server");
}

void AddSizeOptions(CLI::App& app, Settings& settings) {
  app.add_option("--tokens", settings.tokens, "Tokens of a batch")
      ->check(CLI::Range(int64_t{1}, kMost))
      ->capture_default_str()
      ->group("Load");
  app.add_option("--clients", settings.clients,
                 "Threads, each with a session of its own and one batch under way")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->group("Load");
  app.add_option(
         "--chunk_bytes", settings.chunk_bytes,
         "Hidden-state bytes of the largest chunks, as 4194304 or 4M; 0: what suits the server's device")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str()
      ->group("Load");
  app.add_option("--lanes", settings.lanes,
                 "Connections of each client; 0: the client's choice, by the size of a row of the head")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str()
      ->group("Load");
}

void AddLoadOptions(CLI::App& app, Settings& settings) {
  constexpr char kHead[] = "Head and data";
  constexpr char kGroup[] = "Load";
  const CLI::Range sizes(int64_t{1}, kMost);
  app.add_option("--vocab", settings.vocab, "Vocabulary of the head")
      ->check(sizes)
      ->capture_default_str()
      ->group(kHead);
  app.add_option("--hidden", settings.hidden, "Hidden size")
      ->check(sizes)
      ->capture_default_str()
      ->group(kHead);
  // One for all comes first, whatever the order on the command line: CLI11 calls back in this order.
  AddTypeOption(app, "--dtype", "Type of weights, hidden states and dX (default: bf16)",
                {&settings.weight_type, &settings.hidden_type, &settings.dx_type});
  AddTypeOption(app, "--weight_dtype", "Type of the weights alone", {&settings.weight_type});
  AddTypeOption(app, "--hidden_dtype", "Type of the hidden states alone", {&settings.hidden_type});
  AddTypeOption(app, "--dx_dtype", "Type of dX alone", {&settings.dx_type});
  app.add_option("--ignored", settings.ignored, "Share of the tokens that have no label")
      ->check(CLI::Range(0.0, 0.99))
      ->capture_default_str()
      ->group(kHead);
  app.add_flag_callback(
         "--loss_only", [&settings] { settings.mode = ComputeMode::kLossOnly; },
         "Ask for losses, not for dX and dW")
      ->group(kHead);
  AddLossOptions(app, settings.loss);
  app.add_option("--seed", settings.seed, "Of weights, data and arrivals")
      ->capture_default_str()
      ->group(kHead);
  auto* const duration = app.add_option("--duration", settings.amount.duration, "Seconds to measure")
                             ->check(CLI::Range(0.01, 1e6))
                             ->capture_default_str()
                             ->group(kGroup);
  app.add_option("--batches", settings.amount.batches, "Batches to measure, of all clients together, instead")
      ->check(CLI::Range(int64_t{1}, kMost))
      ->excludes(duration)
      ->group(kGroup);
  app.add_option("--warm_up", settings.warm_up, "Batches of each client before anything is measured")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str()
      ->group(kGroup);
  app.add_option("--flushes", settings.flushes,
                 "After the load, read dW this often as fp32 and as bf16, and say how long it takes")
      ->check(CLI::Range(0, 10000))
      ->capture_default_str()
      ->group(kGroup);
  app.add_option(
         "--rate", settings.rate,
         "Open loop: this many batches a second arrive at random times (Poisson), and wait in line "
         "where no client is free. Without it, closed loop: a client sends its next batch when it has "
         "the answer to the one before")
      ->check(CLI::Range(1e-6, 1e6))
      ->group(kGroup);
}

std::string Problem(const Settings& settings) {
  if (!settings.devices.empty() && settings.devices != "all" &&
      settings.devices.find(',') == std::string::npos) {
    return "--devices wants two devices or more, with commas; one is measured with --device=" +
           settings.devices;
  }
  const size_t shares = settings.devices.empty() ? 1 : DevicesOfReplicas(settings).size();
  if (settings.replicas > 1 &&
      (settings.devices == "all" || shares != static_cast<size_t>(settings.replicas))) {
    return "--replicas wants --devices by name, as many for each of them: --devices=cuda:0,cuda:1 "
           "--replicas=2";
  }
  if (settings.replicas > 1 && settings.transport != Transport::kTcp) {
    return "--replicas wants --transport=tcp: clients are spread over servers by their addresses";
  }
  if (settings.flushes > 0 && settings.mode == ComputeMode::kLossOnly) {
    return "--flushes reads a gradient, and with --loss_only there is none";
  }
  const int64_t elements = int64_t{1} << 40;
  if (settings.vocab > elements / settings.hidden) return "--vocab times --hidden is too much for any memory";
  if (settings.tokens > elements / settings.hidden) {
    return "--tokens times --hidden is too much for any memory";
  }
  if (settings.rate > 0 && settings.amount.batches == 0 && settings.rate * settings.amount.duration > 1e8) {
    return "--rate times --duration is more than 100 million batches";
  }
  return "";
}

SessionOptions SessionOptionsOf(const Settings& settings) {
  return {.chunk_bytes = settings.chunk_bytes,
          .lanes = static_cast<int32_t>(settings.lanes),
          .timing = Timing::kReport};
}

const char* TransportName(const Settings& settings) {
  if (!settings.target.empty()) {
    if (settings.connection.tls.has_value()) return "tls";
    return settings.target.starts_with("unix") ? "uds" : "tcp";
  }
  switch (settings.transport) {
    case Transport::kTcp:
      break;
    case Transport::kUnix:
      return "uds";
    case Transport::kTls:
      return "tls";
    case Transport::kShm:
      return "shm";
    case Transport::kCudaIpc:
      return "cuda_ipc";
  }
  return "tcp";
}

nlohmann::ordered_json ToJson(const Settings& settings) {
  nlohmann::ordered_json json = {{"transport", TransportName(settings)},
                                 {"tokens", settings.tokens},
                                 {"vocab", settings.vocab},
                                 {"hidden", settings.hidden},
                                 {"weight_dtype", Name(settings.weight_type)},
                                 {"hidden_dtype", Name(settings.hidden_type)},
                                 {"dx_dtype", Name(settings.dx_type)},
                                 {"loss_only", settings.mode == ComputeMode::kLossOnly},
                                 {"chunk_bytes", settings.chunk_bytes},
                                 {"lanes", settings.lanes},
                                 {"ignored", settings.ignored},
                                 {"label_smoothing", settings.loss.label_smoothing},
                                 {"lse_square_scale", settings.loss.lse_square_scale},
                                 {"softcap", settings.loss.softcap.value_or(0)},
                                 {"logit_scale", settings.loss.logit_scale.value_or(1)},
                                 {"clients", settings.clients},
                                 {"flushes", settings.flushes},
                                 {"warm_up", settings.warm_up},
                                 {"loop", settings.rate > 0 ? "open" : "closed"},
                                 {"rate", nullptr},
                                 {"seed", settings.seed}};
  if (settings.rate > 0) json["rate"] = settings.rate;
  return json;
}

}  // namespace lossd::perf
