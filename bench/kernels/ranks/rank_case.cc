#include "bench/kernels/ranks/rank_case.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "bench/kernels/command_line.h"
#include "bench/kernels/measure.h"
#include "bench/kernels/ranks/rank_processes.h"
#include "bench/kernels/ranks/rank_report.h"

namespace lossd::bench {
namespace {

using Json = nlohmann::ordered_json;
using kernels::collectives::Communicator;
using kernels::collectives::Rendezvous;

constexpr int64_t kRankWarmUpRounds = 1;
constexpr double kRankLossTolerance = 1e-5;
constexpr double kRankGradientTolerance = 4e-3;

// What ends all ranks: one of them has failed amid others that wait for it, or is gone.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void Require(const std::string& problem) {
  if (!problem.empty()) throw Failure(problem);
}

// Where the ranks are and what they say to each other.
class Rank {
 public:
  Rank(const DevicesOptions& options, int rank, Rendezvous& rendezvous)
      : options_(options), rank_(rank), rendezvous_(rendezvous) {}

  void Connect() {
    const int cuda = cuda_index();
    Require(cuda < 0 ? ConnectCpuRank(rank_, options_.ranks(), rendezvous_, &communicator_)
                     : ConnectCudaRank(cuda, rank_, options_.ranks(), rendezvous_, &communicator_));
  }

  int number() const { return rank_; }
  int cuda_index() const { return CudaIndex(options_.devices[static_cast<size_t>(rank_)]); }
  Communicator& communicator() const { return *communicator_; }

  void Meet() const {
    if (const auto result = communicator_->Barrier(nullptr); !result.ok()) throw Failure(result.message());
  }
  std::vector<std::string> Gather(const std::string& own) const {
    std::vector<std::string> all;
    const auto result = rendezvous_.AllGather(own, kLongestRankTurn, &all);
    if (!result.ok()) throw Failure(result.message());
    return all;
  }
  // The first rank's problem that has one, the same at all.
  std::string Agree(const std::string& own) const {
    const std::vector<std::string> all = Gather(own);
    for (size_t i = 0; i < all.size(); ++i) {
      if (!all[i].empty()) return "rank " + std::to_string(i) + " (" + options_.devices[i] + "): " + all[i];
    }
    return "";
  }

 private:
  const DevicesOptions& options_;
  const int rank_;
  Rendezvous& rendezvous_;
  std::unique_ptr<Communicator> communicator_;
};

class RankCase {
 public:
  RankCase(const KernelCase& kernel_case, const DevicesOptions& options, const Rank& rank)
      : case_(kernel_case), options_(options), rank_(rank) {}

  // The same at all ranks: an error, or null. Throws Failure.
  std::string Run(const Progress& progress) {
    if (case_.vocab < options_.ranks()) return "the vocabulary has fewer entries than there are devices";
    progress("making random data");
    if (std::string problem = rank_.Agree(Create()); !problem.empty()) return problem;
    Require(step_->Connect());
    progress("comparing with one device");
    if (std::string problem = rank_.Agree(Compare()); !problem.empty()) return problem;
    for (int64_t round = -kRankWarmUpRounds; round < case_.repetitions; ++round) {
      if (round == 0) times_ = {};
      progress(round < 0 ? "warming up"
                         : "timing, round " + std::to_string(round + 1) + " of " +
                               std::to_string(case_.repetitions));
      TimeRound(round);
    }
    return "";
  }

  void Disconnect() {
    if (step_ != nullptr) step_->Disconnect();
    rank_.Meet();
  }

  RankTimes Summarize() const {
    RankTimes summary = times_;
    summary.difference = difference_;
    summary.whole_tile_rows = step_->whole_tile_rows();
    summary.tile_rows = step_->tile_rows();
    summary.uses_copy_engines = step_->uses_copy_engines();
    summary.hardware = step_->hardware();
    return summary;
  }

 private:
  std::string Create() {
    try {
      step_ = case_.cuda_index < 0 ? MakeCpuRankStep(case_, options_, rank_.communicator())
                                   : MakeCudaRankStep(case_, options_, rank_.communicator());
      return step_->Create();
    } catch (const std::bad_alloc&) {
    } catch (const std::length_error&) {
    }
    return "not enough memory for the case";
  }

  // With the whole head on one device, whose results are checked where one device is measured.
  std::string Compare() {
    Require(step_->Compare(&difference_));
    if (difference_.loss <= kRankLossTolerance && difference_.dx <= kRankGradientTolerance &&
        difference_.dw <= kRankGradientTolerance) {
      return "";
    }
    return "the result is not that of one device: losses differ by " + std::to_string(difference_.loss) +
           ", dX by " + std::to_string(difference_.dx) + ", dW by " + std::to_string(difference_.dw);
  }

  // Devices slow down as they heat up: who went first goes second in the next round.
  void TimeRound(int64_t round) {
    const bool whole_first = round % 2 == 0;
    if (whole_first) TimeWhole();
    double milliseconds = 0;
    rank_.Meet();
    Require(step_->TimeShard(&milliseconds));
    times_.all_milliseconds.push_back(milliseconds);
    if (!whole_first) TimeWhole();
    rank_.Meet();
    StageTimes stages;
    Require(step_->TimeStages(&stages));
    times_.Add(stages);
  }

  // Each device computes the whole head while the others wait, and then all do at once: devices of one host
  // may be slower together.
  void TimeWhole() {
    for (int turn = 0; turn <= options_.ranks(); ++turn) {
      const bool together = turn == options_.ranks();
      rank_.Meet();
      if (!together && turn != rank_.number()) continue;
      double milliseconds = 0;
      Require(step_->TimeWhole(&milliseconds));
      (together ? times_.all_busy_milliseconds : times_.all_one_device_milliseconds).push_back(milliseconds);
    }
  }

  const KernelCase& case_;
  const DevicesOptions& options_;
  const Rank& rank_;
  std::unique_ptr<RankStep> step_;
  RelativeErrors difference_;
  RankTimes times_;
};

// Rank 0 says of every case what came out. False if one failed.
bool RunCases(const std::vector<KernelCase>& cases, const DevicesOptions& options, Rank& rank,
              std::vector<Json>* results) {
  rank.Connect();
  bool all_right = true;
  for (size_t i = 0; i < cases.size(); ++i) {
    KernelCase own = cases[i];
    own.cuda_index = rank.cuda_index();
    const auto say = [&](const std::string& what) {
      if (rank.number() > 0) return;
      std::fprintf(stderr, "case %zu of %zu: %s\n", i + 1, cases.size(), what.c_str());
    };
    RankCase one(own, options, rank);
    const std::string problem = one.Run(say);
    if (problem.empty()) {
      results->push_back(Collect(own, options, rank.Gather(ToJson(one.Summarize()).dump())));
    } else {
      say(problem);
      results->push_back(Failed(own, options, problem));
      all_right = false;
    }
    one.Disconnect();
  }
  return all_right;
}

}  // namespace

bool RunCasesOverDevices(const std::vector<KernelCase>& cases, const DevicesOptions& options,
                         const std::function<void(const std::vector<Json>&)>& print) {
  return RunRanks(options.ranks(), [&](int number, Rendezvous& rendezvous) {
    Rank rank(options, number, rendezvous);
    try {
      std::vector<Json> results;
      const bool all_right = RunCases(cases, options, rank, &results);
      if (number > 0) return true;  // who returns false ends the others, and rank 0 has still to print
      print(results);
      return all_right;
    } catch (const Failure& failure) {
      std::fprintf(stderr, "rank %d (%s): %s\n", number, options.devices[static_cast<size_t>(number)].c_str(),
                   failure.what());
      return false;
    }
  });
}

}  // namespace lossd::bench
