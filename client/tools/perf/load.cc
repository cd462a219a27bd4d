#include "client/tools/perf/load.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <latch>
#include <memory>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace lossd::perf {
namespace {

constexpr auto kWatchInterval = std::chrono::milliseconds(50);
// After a failure: a client that is refused shall not make refusing all that the server does.
constexpr auto kBackOff = std::chrono::milliseconds(50);

struct Shared {
  Shared(const Settings& run_settings, Client& run_client, const Head& run_head)
      : settings(run_settings),
        client(run_client),
        head(run_head),
        pacer(settings.rate, settings.amount, settings.seed) {}
  const Settings& settings;
  Client& client;
  const Head& head;
  Pacer pacer;
  std::latch go{1};
  std::atomic<bool> interrupted{false};
  std::atomic<int64_t> warming{0};  // clients that are not done with that yet
  std::atomic<int64_t> running{0};
  std::atomic<int64_t> batches{0};
  std::atomic<int64_t> failures{0};
};

// What one client sends in turns, so that no cache has it all.
struct Sample {
  Inputs inputs;
  std::optional<double> loss_sum = {};  // of the first answer: the weights never change, so it never does
};

class LoadClient {
 public:
  LoadClient(Shared* shared, int64_t index) : shared_(shared), index_(index) {}

  void Run() {
    constexpr int kSamples = 2;
    const Settings& settings = shared_->settings;
    for (int i = 0; i < kSamples; ++i) {
      const auto seed = settings.seed + static_cast<uint64_t>(1 + index_ * kSamples + i);
      samples_.push_back({.inputs = Inputs(settings, seed)});
    }
    outputs_ = std::make_unique<Outputs>(settings);
    for (int64_t i = 0; i < settings.warm_up && !shared_->interrupted; ++i) (void)Attempt();
    --shared_->warming;
    shared_->go.wait();
    while (const std::optional<Clock::time_point> due = shared_->pacer.Next()) {
      const std::optional<BatchResult> answer = Attempt();
      if (answer) Record(*due, *answer);
    }
    End();
    --shared_->running;
  }

  const LoadResult& result() const { return result_; }
  Clock::time_point last_answer() const { return last_answer_; }

 private:
  // One batch, with a session where there is none yet or no more.
  std::optional<BatchResult> Attempt() {
    absl::StatusOr<BatchResult> answer = TryAttempt();
    if (answer.ok()) return *answer;
    ++result_.errors[answer.status().code()];
    if (result_.first_error.empty()) result_.first_error = answer.status().ToString();
    ++shared_->failures;
    if (session_) {
      (void)session_->Close();  // it may be of no use, and the server would keep its credit for the lease
      result_.reconnects += session_->reconnects();
      session_.reset();
    }
    std::this_thread::sleep_for(kBackOff);
    return std::nullopt;
  }

  absl::Status ShareMemory() {
    for (Sample& sample : samples_) {
      if (absl::Status status = Share(shared_->client, shared_->settings, sample.inputs); !status.ok()) {
        return status;
      }
    }
    return Share(shared_->client, shared_->settings, *outputs_);
  }

  absl::StatusOr<BatchResult> TryAttempt() {
    if (!memory_shared_) {
      if (absl::Status status = ShareMemory(); !status.ok()) return status;
      memory_shared_ = true;
    }
    if (!session_) {
      auto session = shared_->head.OpenSession(SessionOptionsOf(shared_->settings));
      if (!session.ok()) return session.status();
      session_.emplace(*std::move(session));
      result_.lanes = std::max(result_.lanes, static_cast<int64_t>(session_->marks().lanes.size()));
    }
    Sample& sample = samples_[turn_++ % samples_.size()];
    auto answer = Compute(*session_, shared_->settings, sample.inputs, *outputs_);
    if (!answer.ok()) return answer;
    if (!sample.loss_sum) sample.loss_sum = answer->loss_sum;
    constexpr double kTolerance = 1e-6;
    const double difference = std::abs(answer->loss_sum - *sample.loss_sum);
    // Written so that NaN is wrong.
    const bool same = difference <= kTolerance * std::abs(*sample.loss_sum);
    if (!same || answer->valid_tokens != sample.inputs.valid_tokens) {
      ++result_.wrong_results;
      ++shared_->failures;
    }
    return answer;
  }

  void Record(Clock::time_point due, const BatchResult& answer) {
    last_answer_ = Clock::now();
    result_.latencies.push_back(std::chrono::duration<double>(last_answer_ - due).count());
    ++result_.batches;
    result_.tokens += shared_->settings.tokens;
    result_.chunks += answer.chunks;
    result_.timings.insert(result_.timings.end(), answer.timings.begin(), answer.timings.end());
    ++shared_->batches;
  }

  void End() {
    if (!session_) return;
    result_.reconnects += session_->reconnects();
    for (const LanePlace& place : session_->lane_places()) ++result_.lanes_at[place.target];
    (void)session_->Close();
  }

  Shared* const shared_;
  const int64_t index_;
  std::vector<Sample> samples_;
  std::unique_ptr<Outputs> outputs_;
  bool memory_shared_ = false;
  std::optional<Session> session_;
  size_t turn_ = 0;
  LoadResult result_;
  Clock::time_point last_answer_;
};

void Watch(Shared& shared, const std::atomic<int64_t>& busy, const LoadHooks& hooks,
           LoadProgress::Phase phase, const std::atomic<bool>& interrupted) {
  while (busy > 0) {
    if (interrupted) {
      shared.interrupted = true;
      shared.pacer.Stop();
    }
    LoadProgress progress{.phase = phase, .batches = shared.batches, .failures = shared.failures};
    if (phase == LoadProgress::Phase::kMeasuring) {
      const Clock::time_point now = Clock::now();
      progress.fraction = shared.pacer.Progress(now);
      progress.seconds = std::chrono::duration<double>(now - shared.pacer.start()).count();
    }
    hooks.progress(progress);
    std::this_thread::sleep_for(kWatchInterval);
  }
}

LoadResult Gather(const Shared& shared, const std::vector<std::unique_ptr<LoadClient>>& clients) {
  LoadResult all;
  Clock::time_point last = shared.pacer.start();
  for (const auto& client : clients) {
    const LoadResult& one = client->result();
    all.batches += one.batches;
    all.tokens += one.tokens;
    all.chunks += one.chunks;
    all.wrong_results += one.wrong_results;
    all.reconnects += one.reconnects;
    all.lanes = std::max(all.lanes, one.lanes);
    for (const auto& [target, lanes] : one.lanes_at) all.lanes_at[target] += lanes;
    all.latencies.insert(all.latencies.end(), one.latencies.begin(), one.latencies.end());
    all.timings.insert(all.timings.end(), one.timings.begin(), one.timings.end());
    for (const auto& [code, count] : one.errors) all.errors[code] += count;
    if (all.first_error.empty()) all.first_error = one.first_error;
    if (one.batches > 0) last = std::max(last, client->last_answer());
  }
  all.seconds = std::chrono::duration<double>(last - shared.pacer.start()).count();
  all.waited_in_vain = shared.pacer.WaitedInVain(Clock::now());
  return all;
}

}  // namespace

LoadResult RunLoad(const Settings& settings, Client& client, const Head& head, const LoadHooks& hooks,
                   const std::atomic<bool>& interrupted) {
  Shared shared(settings, client, head);
  shared.warming = shared.running = settings.clients;
  std::vector<std::unique_ptr<LoadClient>> clients;
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < settings.clients; ++i) {
    clients.push_back(std::make_unique<LoadClient>(&shared, i));
    threads.emplace_back([load = clients.back().get()] { load->Run(); });
  }
  Watch(shared, shared.warming, hooks, LoadProgress::Phase::kWarmUp, interrupted);
  hooks.before();
  shared.pacer.Start(Clock::now());
  shared.go.count_down();
  Watch(shared, shared.running, hooks, LoadProgress::Phase::kMeasuring, interrupted);
  hooks.after();
  for (std::thread& thread : threads) thread.join();
  return Gather(shared, clients);
}

}  // namespace lossd::perf
