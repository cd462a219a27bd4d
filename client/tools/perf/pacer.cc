#include "client/tools/perf/pacer.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

namespace lossd::perf {
namespace {

constexpr double kLeastPatience = 10;  // seconds
// A stop is noticed this soon while nothing is due.
constexpr auto kNap = std::chrono::milliseconds(50);

}  // namespace

std::vector<double> PoissonArrivals(double rate, const Amount& amount, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<double> arrivals;
  double at = 0;
  for (;;) {
    // Not std::exponential_distribution: its values differ between libraries.
    const double uniform = static_cast<double>(random() >> 11) * 0x1p-53;
    at += -std::log1p(-uniform) / rate;
    const bool done =
        amount.batches > 0 ? static_cast<int64_t>(arrivals.size()) >= amount.batches : at >= amount.duration;
    if (done) return arrivals;
    arrivals.push_back(at);
  }
}

Pacer::Pacer(double rate, const Amount& amount, uint64_t seed)
    : rate_(rate),
      amount_(amount),
      arrivals_(rate > 0 ? PoissonArrivals(rate, amount, seed) : std::vector<double>()) {}

Clock::time_point Pacer::At(double seconds) const {
  return start_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void Pacer::Start(Clock::time_point start) {
  start_ = start;
  const double last = arrivals_.empty() ? 0 : arrivals_.back();
  end_ = At(rate_ > 0 ? last + std::max(last, kLeastPatience) : amount_.duration);
}

std::optional<Clock::time_point> Pacer::Next() {
  if (stopped_) return std::nullopt;
  const int64_t index = next_.fetch_add(1);
  if (rate_ == 0) {
    const Clock::time_point now = Clock::now();
    const bool more = amount_.batches > 0 ? index < amount_.batches : now < end_;
    if (!more) return std::nullopt;
    ++taken_;
    return now;
  }
  if (index >= static_cast<int64_t>(arrivals_.size())) return std::nullopt;
  const Clock::time_point due = At(arrivals_[static_cast<size_t>(index)]);
  for (Clock::time_point now = Clock::now(); now < due; now = Clock::now()) {
    if (stopped_) return std::nullopt;
    std::this_thread::sleep_until(std::min(due, now + kNap));
  }
  if (stopped_ || Clock::now() >= end_) return std::nullopt;
  ++taken_;
  return due;
}

double Pacer::Progress(Clock::time_point now) const {
  double fraction = 0;
  if (rate_ > 0) {
    fraction = static_cast<double>(taken_) / static_cast<double>(std::max<size_t>(arrivals_.size(), 1));
  } else if (amount_.batches > 0) {
    fraction = static_cast<double>(taken_) / static_cast<double>(amount_.batches);
  } else {
    fraction = std::chrono::duration<double>(now - start_).count() / amount_.duration;
  }
  return std::clamp(fraction, 0.0, 1.0);
}

std::vector<double> Pacer::WaitedInVain(Clock::time_point now) const {
  std::vector<double> waits;
  for (auto i = static_cast<size_t>(taken_); i < arrivals_.size(); ++i) {
    const double wait = std::chrono::duration<double>(now - At(arrivals_[i])).count();
    if (wait > 0) waits.push_back(wait);
  }
  return waits;
}

}  // namespace lossd::perf
