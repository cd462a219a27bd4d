#include "server/telemetry/status_page/throughput.h"

#include <chrono>

namespace lossd::telemetry {
namespace {

constexpr std::chrono::seconds kInterval(1);

WorkSample Take(const engine::Counters& counters) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  WorkSample sample;
  sample.seconds = std::chrono::duration<double>(now).count();
  sample.tokens = static_cast<double>(counters.tokens_valid + counters.tokens_ignored);
  sample.chunks = static_cast<double>(counters.chunks_accumulated + counters.chunks_input_gradient +
                                      counters.chunks_loss_only);
  sample.bytes_in = static_cast<double>(counters.payload_bytes_in);
  sample.bytes_out = static_cast<double>(counters.payload_bytes_out);
  return sample;
}

}  // namespace

void WorkHistory::Add(const WorkSample& sample) {
  samples_.push_back(sample);
  if (samples_.size() > kMost) samples_.pop_front();
}

WorkRates WorkHistory::Rates(double seconds) const {
  if (samples_.size() < 2) return {};
  const WorkSample& last = samples_.back();
  auto first = std::prev(samples_.end(), 2);
  while (first != samples_.begin() && last.seconds - std::prev(first)->seconds <= seconds) --first;
  const double passed = last.seconds - first->seconds;
  if (passed <= 0) return {};
  return {(last.tokens - first->tokens) / passed, (last.chunks - first->chunks) / passed,
          (last.bytes_in - first->bytes_in) / passed, (last.bytes_out - first->bytes_out) / passed};
}

std::vector<double> WorkHistory::TokensPerSecond() const {
  std::vector<double> rates;
  for (size_t i = 1; i < samples_.size(); ++i) {
    const double passed = samples_[i].seconds - samples_[i - 1].seconds;
    rates.push_back(passed > 0 ? (samples_[i].tokens - samples_[i - 1].tokens) / passed : 0);
  }
  return rates;
}

Throughput::Throughput(const engine::Counters* counters) : counters_(counters), thread_([this] { Run(); }) {}

Throughput::~Throughput() {
  {
    const engine::MutexLock lock(mutex_);
    stopped_ = true;
  }
  stopping_.NotifyAll();
  thread_.join();
}

Throughput::Reading Throughput::Read() const {
  const engine::MutexLock lock(mutex_);
  return {history_.Rates(kRecentSeconds), history_.TokensPerSecond()};
}

void Throughput::Run() {
  const engine::MutexLock lock(mutex_);
  while (!stopped_) {
    history_.Add(Take(*counters_));
    const auto next = std::chrono::steady_clock::now() + kInterval;
    while (!stopped_) {
      if (stopping_.WaitUntil(mutex_, next) == std::cv_status::timeout) break;
    }
  }
}

}  // namespace lossd::telemetry
