// Fault proxies in front of a server, one for each client, as a process that a test starts. It writes lines
// of JSON: the ports first, then every fault as it happens. Faults happen from a line "storm" of its standard
// input to a line "calm"; it ends when that does.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdint>
#include <iostream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/proxy/fault_proxy.h"

namespace {

using lossd::testing::Fault;
using lossd::testing::FaultKind;
using lossd::testing::FaultProxy;
using lossd::testing::IfNobody;
using std::chrono::milliseconds;

struct Options {
  std::vector<std::string> tls;    // backends, one for each client
  std::vector<std::string> plain;  // behind those in the order of ways
  std::vector<std::string> lanes;  // of a server over several devices: other places of it, of each way in tls
  uint64_t seed = 0;
  double mean_bytes = 40000;  // from one fault of a connection to the next
  double end_share = 0.65;    // of faults that end the connection
  std::string under_way;  // a file of one 32-bit number for each way, above 0 while it has a call under way
};

// What connections to other places are counted from.
constexpr int kLaneConnections = 1'000'000;

// Draws what happens to one connection.
class Planner {
 public:
  Planner(const Options& options, size_t way, int connection)
      : options_(options), is_tls_(way < options.tls.size()) {
    std::seed_seq seed{options.seed, static_cast<uint64_t>(way), static_cast<uint64_t>(connection)};
    random_.seed(seed);
  }

  // Up to the first fault that ends it.
  std::vector<Fault> Draw() {
    std::vector<Fault> plan;
    bool ends = false;
    while (!ends) {
      ends = Chance(options_.end_share);
      plan.push_back(ends ? DrawEnd(plan.empty()) : DrawHitch());
      // Some in the midst of what a connection begins with.
      const bool early = plan.size() == 1 && Chance(0.2);
      if (plan.back().kind == FaultKind::kMirror && !is_tls_) continue;
      plan.back().after_bytes = early ? Below(4096) : static_cast<int64_t>(Exponential(options_.mean_bytes));
    }
    return plan;
  }

 private:
  Fault DrawEnd(bool first) {
    const int64_t kind = Below(8);
    if (kind < 4) return {.kind = FaultKind::kCut};
    if (kind < 6) return {.kind = FaultKind::kHalfClose, .time = milliseconds(Chance(0.5) ? 0 : Below(400))};
    if (is_tls_) return {.kind = kind == 6 ? FaultKind::kMirror : FaultKind::kRepeat};
    if (!first || kind == 7) return {.kind = FaultKind::kCut};
    return {.kind = FaultKind::kMirror,
            .if_nobody = IfNobody::kSkip};  // of plain text at its first byte alone
  }

  Fault DrawHitch() {
    const bool long_one = Chance(0.02);
    const milliseconds time(long_one ? 1000 + Below(3000) : 10 + Below(200));
    return {.kind = Chance(0.5) ? FaultKind::kStall : FaultKind::kDelay, .time = time};
  }

  bool Chance(double share) { return std::bernoulli_distribution(share)(random_); }
  int64_t Below(int64_t limit) { return std::uniform_int_distribution<int64_t>(0, limit - 1)(random_); }
  double Exponential(double mean) { return std::exponential_distribution<double>(1 / mean)(random_); }

  const Options& options_;
  const bool is_tls_;
  std::mt19937_64 random_;
};

// The file in which clients say whether they have calls under way.
class CallsUnderWay {
 public:
  CallsUnderWay(const std::string& path, size_t ways) : bytes_(ways * sizeof(uint32_t)) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) throw CLI::RuntimeError("--under_way cannot be mapped", 1);
    numbers_ = static_cast<uint32_t*>(mapped);
  }
  ~CallsUnderWay() { munmap(numbers_, bytes_); }
  CallsUnderWay(const CallsUnderWay&) = delete;
  CallsUnderWay& operator=(const CallsUnderWay&) = delete;

  bool Any(size_t way) const { return std::atomic_ref(numbers_[way]).load() > 0; }

 private:
  const size_t bytes_;
  uint32_t* numbers_ = nullptr;
};

// Where a way has the ports of the server itself: clients are told these.
std::string AtOwnAddress(size_t way, const std::string& backend) {
  return "127.0.0." + std::to_string(way + 2) + backend.substr(backend.rfind(':'));
}

void Run(const Options& options) {
  std::vector<std::string> backends = options.tls;
  backends.insert(backends.end(), options.plain.begin(), options.plain.end());
  const CallsUnderWay calls(options.under_way, backends.size());
  std::mutex output;
  std::atomic<bool> storm = false;
  const auto write = [&output](const nlohmann::json& line) {
    const std::lock_guard lock(output);
    std::cout << line.dump() << std::endl;
  };
  std::vector<std::unique_ptr<FaultProxy>> proxies;
  // `first`: what connections are counted from.
  const auto add = [&](size_t way, const std::string& backend, const std::string& listen, int first) {
    proxies.push_back(std::make_unique<FaultProxy>(
        backend,
        [&options, way, first](int connection) { return Planner(options, way, first + connection).Draw(); },
        FaultProxy::Watch{.would_hit = [&, way] { return storm && calls.Any(way); },
                          .happens =
                              [&write, way, first](int connection, int64_t bytes, const Fault& fault) {
                                write({{"way", way},
                                       {"connection", first + connection},
                                       {"bytes", bytes},
                                       {"fault", NameOf(fault.kind)},
                                       {"milliseconds", fault.time.count()}});
                              }},
        listen));
  };
  nlohmann::json ports = nlohmann::json::array();
  for (size_t way = 0; way < backends.size(); ++way) {
    const bool lanes = !options.lanes.empty() && way < options.tls.size();
    add(way, backends[way], lanes ? AtOwnAddress(way, backends[way]) : "127.0.0.1:0", 0);
    ports.push_back(proxies.back()->port());
    for (size_t i = 0; lanes && i < options.lanes.size(); ++i) {
      add(way, options.lanes[i], AtOwnAddress(way, options.lanes[i]),
          kLaneConnections * static_cast<int>(i + 1));
    }
  }
  write({{"ports", ports}});
  for (std::string line; std::getline(std::cin, line);) storm = line == "storm";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Proxies on loopback whose connections are cut, stalled, delayed, mirrored and half closed at random.");
  Options options;
  app.add_option("--tls", options.tls,
                 "127.0.0.1:PORT or unix:PATH of a server that speaks TLS: a way to it");
  app.add_option("--plain", options.plain, "the same of one that does not; these ways come after those");
  app.add_option(
      "--lanes", options.lanes,
      "127.0.0.1:PORT of another process of the TLS server, which clients are told of: every TLS way then "
      "has an address of loopback of its own, 127.0.0.2 and so on, with the ports of the server");
  app.add_option("--seed", options.seed, "of what happens to which connection")->capture_default_str();
  app.add_option("--mean_bytes", options.mean_bytes, "from one fault of a connection to the next")
      ->capture_default_str();
  app.add_option("--end_share", options.end_share, "of faults that end the connection")
      ->capture_default_str();
  app.add_option("--under_way", options.under_way,
                 "file of one 32-bit number for each way: faults happen while it is above 0")
      ->required();
  CLI11_PARSE(app, argc, argv);
  try {
    Run(options);
  } catch (const CLI::Error& error) {
    return app.exit(error);
  }
  return 0;
}
