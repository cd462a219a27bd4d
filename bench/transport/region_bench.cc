// What a trainer on the server's host pays for the server: the same batches by the CPU backend in this
// process, and by a lossd over shared memory, in turns. One JSON object on standard output.
//
//   lossd-region-bench --tokens=1024 --vocab=32768 --hidden=512 --dtype=bf16
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "lossd/client.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/memory/process_memory.h"

namespace lossd::transport {
namespace {

using Clock = std::chrono::steady_clock;

enum class Way { kRegions, kPayloads };

struct Options {
  int64_t tokens = 1024;
  int64_t vocab = 32768;
  int64_t hidden = 512;
  DataType type = DataType::kBFloat16;
  Way way = Way::kRegions;
  int64_t chunk_bytes = 0;
  int batches = 4;  // of a round
  int rounds = 5;
  double most = 0;  // ratio; 0: whatever it is
  std::string lossd = LOSSD_BINARY;
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "lossd-region-bench: %s\n", what.c_str());
  std::exit(1);
}

void Require(const absl::Status& status, const std::string& what) {
  if (!status.ok()) Die(what + ": " + status.ToString());
}

kernels::DataType KernelType(DataType type) {
  return type == DataType::kFloat32 ? kernels::DataType::kFloat32 : kernels::DataType::kBFloat16;
}

std::vector<std::byte> Random(int64_t count, double deviation, DataType type, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, static_cast<float>(deviation));
  std::vector<float> wide(static_cast<size_t>(count));
  for (float& value : wide) value = normal(generator);
  std::vector<std::byte> values(static_cast<size_t>(count * SizeOf(type)));
  kernels::Convert(kernels::DataType::kFloat32, wide.data(), KernelType(type), values.data(), count);
  return values;
}

// A lossd on a free port, for as long as the object lives.
class Server {
 public:
  explicit Server(const std::string& program) {
    std::string folder = (std::filesystem::temp_directory_path() / "lossd-bench-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) Die("no temporary folder");
    folder_ = folder;
    std::vector<std::string> arguments = {program,
                                          "--device=cpu",
                                          "--listen=127.0.0.1:0",
                                          "--metrics_listen=",
                                          "--port_file=" + folder_ + "/port",
                                          "--same_host_regions",
                                          "--log_level=error"};
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    if (posix_spawn(&pid_, program.c_str(), nullptr, nullptr, pointers.data(), environ) != 0) {
      Die("cannot start " + program);
    }
    while (!std::filesystem::exists(folder_ + "/port")) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) Die("lossd ended before it served");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::ifstream file(folder_ + "/port");
    port_ = nlohmann::json::parse(file)["grpc"].get<int>();
  }
  ~Server() {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
    std::filesystem::remove_all(folder_);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  pid_t pid() const { return pid_; }
  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  std::string folder_;
  pid_t pid_ = -1;
  int port_ = 0;
};

struct Data {
  explicit Data(const Options& options)
      : weights(Random(options.vocab * options.hidden, 1 / std::sqrt(static_cast<double>(options.hidden)),
                       options.type, 1)),
        hidden(Random(options.tokens * options.hidden, 1, options.type, 2)),
        labels(static_cast<size_t>(options.tokens)) {
    std::mt19937 generator(3);
    for (int64_t& label : labels) {
      label = static_cast<int64_t>(generator() % static_cast<uint64_t>(options.vocab));
    }
  }
  std::vector<std::byte> weights;
  std::vector<std::byte> hidden;
  std::vector<int64_t> labels;
};

struct Answers {
  explicit Answers(const Options& options)
      : losses(static_cast<size_t>(options.tokens)),
        dx(static_cast<size_t>(options.tokens * options.hidden * SizeOf(options.type))) {}
  bool operator==(const Answers&) const = default;
  std::vector<float> losses;
  std::vector<std::byte> dx;
};

// The backend that lossd has, without lossd: every batch is one call.
class InProcess {
 public:
  InProcess(const Options& options, const Data& data) : options_(options), data_(data), answers_(options) {
    auto device = engine::CreateCpuDevice(kernels::kDefaultCpuWorkspaceBytes);
    Require(device.status(), "no device");
    device_ = *std::move(device);
    auto backend = device_->CreateHead({"head", options.vocab, options.hidden, KernelType(options.type)});
    Require(backend.status(), "no head");
    backend_ = *std::move(backend);
    auto weights =
        engine::HostBuffer::Create(static_cast<int64_t>(data.weights.size()), engine::Commit::kNow);
    Require(weights.status(), "no memory");
    std::memcpy(weights->data(), data.weights.data(), data.weights.size());
    Require(backend_->PublishWeights({*std::move(weights)}), "weights");
  }

  void Batch() { Run(options_.tokens, engine::ComputeMode::kLossAndGradients); }
  // One token's loss, when everything before it is done.
  void Finish() { Run(1, engine::ComputeMode::kLossOnly); }
  const Answers& answers() const { return answers_; }

 private:
  void Run(int64_t tokens, engine::ComputeMode mode) {
    const bool gradients = mode == engine::ComputeMode::kLossAndGradients;
    engine::ChunkRows rows;
    rows.tokens = tokens;
    rows.hidden_states.data = data_.hidden.data();
    rows.labels = data_.labels.data();
    rows.accumulate = gradients ? engine::ChunkRows::Accumulate::kYes : engine::ChunkRows::Accumulate::kNo;
    rows.losses = gradients ? answers_.losses.data() : &last_loss_;
    rows.dx = gradients ? answers_.dx.data() : nullptr;
    const kernels::DataType type = KernelType(options_.type);
    absl::Status done = absl::UnknownError("not done");
    backend_->StartBatch({type, gradients ? type : engine::BatchKey().dx_type, mode}, {&rows, 1},
                         {[](size_t) {}, [&done](const auto& report) { done = report.status(); }});
    Require(done, "the batch");
  }

  const Options& options_;
  const Data& data_;
  Answers answers_;
  float last_loss_ = 0;
  std::unique_ptr<engine::Device> device_;
  std::unique_ptr<engine::HeadBackend> backend_;
};

class OverLossd {
 public:
  OverLossd(const Options& options, const Data& data)
      : options_(options), data_(data), server_(options.lossd), answers_(options) {
    auto client = Client::Connect(server_.target(), {});
    Require(client.status(), "Connect");
    client_ = *std::move(client);
    auto head = client_->CreateHead({"head", options.vocab, options.hidden, options.type});
    Require(head.status(), "CreateHead");
    Require(head->WriteWeights(options.type, data.weights.data()).status(), "WriteWeights");
    auto session = head->OpenSession({.chunk_bytes = options.chunk_bytes});
    Require(session.status(), "OpenSession");
    session_ = std::make_unique<Session>(*std::move(session));
    hidden_ = data.hidden.data();
    dx_ = answers_.dx.data();
    if (options.way == Way::kPayloads) return;
    const auto bytes = static_cast<int64_t>(data.hidden.size());
    auto region = client_->CreateRegion(RegionKind::kSystem, 2 * bytes + 16);
    Require(region.status(), "CreateRegion");
    region_ = std::make_unique<Region>(*std::move(region));
    Require(region_->CopyIn(0, data.hidden.data(), bytes), "CopyIn");
    hidden_ = static_cast<std::byte*>(region_->data());
    dx_ = static_cast<std::byte*>(region_->data()) + (bytes + 15) / 16 * 16;
  }

  void Batch() {
    const auto result =
        session_->Compute({.labels = data_.labels, .hidden_type = options_.type, .hidden_states = hidden_},
                          {.losses = answers_.losses, .dx_type = options_.type, .dx = dx_});
    Require(result.status(), "Compute");
    chunks_ = result->chunks;
  }
  // The server's queue is one: this comes after the last batch's dW.
  void Finish() {
    Require(session_
                ->Compute({.labels = std::span(data_.labels).first(1),
                           .hidden_type = options_.type,
                           .hidden_states = data_.hidden.data(),
                           .mode = ComputeMode::kLossOnly},
                          {})
                .status(),
            "Compute");
  }
  Answers answers() {
    if (region_ != nullptr) std::memcpy(answers_.dx.data(), dx_, answers_.dx.size());
    return answers_;
  }
  int64_t chunks() const { return chunks_; }
  pid_t server() const { return server_.pid(); }

 private:
  const Options& options_;
  const Data& data_;
  Server server_;
  Answers answers_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Region> region_;
  const void* hidden_ = nullptr;
  void* dx_ = nullptr;
  int64_t chunks_ = 0;
};

// Processor time of this process and another, to a hundredth of a second.
double CpuSeconds(pid_t other) {
  timespec own{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
  timespec theirs{};
  clockid_t clock{};
  if (clock_getcpuclockid(other, &clock) != 0 || clock_gettime(clock, &theirs) != 0) {
    Die("no clock of the server");
  }
  return static_cast<double>(own.tv_sec + theirs.tv_sec) +
         static_cast<double>(own.tv_nsec + theirs.tv_nsec) * 1e-9;
}

// Seconds a batch, for each round.
struct Times {
  std::vector<double> wall;
  std::vector<double> cpu;  // of this process and the server
};

template <typename Side>
void TakeTime(Side& side, int batches, pid_t server, Times* times) {
  const Clock::time_point begin = Clock::now();
  const double cpu = CpuSeconds(server);
  for (int i = 0; i < batches; ++i) side.Batch();
  side.Finish();
  times->wall.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / batches);
  times->cpu.push_back((CpuSeconds(server) - cpu) / batches);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The median ratio of neighbouring rounds: what else the machine does is much the same for both.
double Ratio(const std::vector<double>& remote, const std::vector<double>& local) {
  std::vector<double> ratios;
  for (size_t i = 0; i < remote.size(); ++i) ratios.push_back(remote[i] / local[i]);
  return Median(ratios);
}

double Least(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

int Measure(const Options& options) {
  const Data data(options);
  InProcess in_process(options, data);
  OverLossd over_lossd(options, data);
  for (int i = 0; i < 2; ++i) {
    in_process.Batch();
    over_lossd.Batch();
  }
  over_lossd.Finish();
  if (!(over_lossd.answers() == in_process.answers())) Die("the answers differ");
  Times local;
  Times remote;
  for (int round = 0; round < options.rounds; ++round) {
    TakeTime(in_process, options.batches, over_lossd.server(), &local);
    TakeTime(over_lossd, options.batches, over_lossd.server(), &remote);
  }
  if (!(over_lossd.answers() == in_process.answers())) Die("the answers differ");
  const double ratio = Ratio(remote.wall, local.wall);
  const nlohmann::ordered_json report = {{"tokens", options.tokens},
                                         {"vocab", options.vocab},
                                         {"hidden", options.hidden},
                                         {"dtype", Name(options.type)},
                                         {"way", options.way == Way::kRegions ? "regions" : "payloads"},
                                         {"chunks", over_lossd.chunks()},
                                         {"in_process_seconds", Median(local.wall)},
                                         {"lossd_seconds", Median(remote.wall)},
                                         {"ratio", ratio},
                                         {"ratio_of_best", Least(remote.wall) / Least(local.wall)},
                                         {"cpu_ratio", Ratio(remote.cpu, local.cpu)}};
  std::printf("%s\n", report.dump().c_str());
  return options.most > 0 && ratio > options.most ? 1 : 0;
}

int Main(int argc, char** argv) {
  // As lossd does: threads that spin for each other would take the processors from the other side.
  if (getenv("OMP_WAIT_POLICY") == nullptr) {
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
  }
  engine::RaiseMallocThresholds();
  Options options;
  CLI::App app{"The cost of lossd on the trainer's own host"};
  const std::map<std::string, DataType> types = {{"fp32", DataType::kFloat32}, {"bf16", DataType::kBFloat16}};
  const std::map<std::string, Way> ways = {{"regions", Way::kRegions}, {"payloads", Way::kPayloads}};
  app.add_option("--tokens", options.tokens);
  app.add_option("--vocab", options.vocab);
  app.add_option("--hidden", options.hidden);
  app.add_option("--dtype", options.type)->transform(CLI::CheckedTransformer(types));
  app.add_option("--way", options.way)->transform(CLI::CheckedTransformer(ways));
  app.add_option("--chunk_bytes", options.chunk_bytes, "0: the client's choice");
  app.add_option("--batches", options.batches, "of a round");
  app.add_option("--rounds", options.rounds, "each side in turns");
  app.add_option("--most", options.most, "exit with 1 if the ratio is above this");
  app.add_option("--lossd", options.lossd, "the server's program");
  CLI11_PARSE(app, argc, argv);
  return Measure(options);
}

}  // namespace
}  // namespace lossd::transport

int main(int argc, char** argv) { return lossd::transport::Main(argc, argv); }
