#include "client/tools/perf/flushes.h"

#include <chrono>
#include <cmath>

#include "absl/strings/str_format.h"
#include "client/tools/perf/problem.h"

namespace lossd::perf {
namespace {

using Clock = std::chrono::steady_clock;

// Every element is off by at most half of its last place, 2^-9 of itself.
constexpr double kMostNormError = 1.0 / 256;

double NormOf(const Tensor& gradient) {
  double squares = 0;
  for (int64_t i = 0; i < gradient.size(); ++i) squares += gradient.At(i) * gradient.At(i);
  return std::sqrt(squares);
}

// One flush, which ends with the window open again.
absl::Status Read(const Head& head, Tensor& gradient, FlushTimes& times) {
  const auto info = head.Info();
  if (!info.ok()) return info.status();
  FlushOptions options;
  options.dtype = gradient.type();
  options.commit = false;
  const Clock::time_point began = Clock::now();
  const auto flush = head.Flush(options, info->sessions, gradient.data());
  if (!flush.ok()) return flush.status();
  times.seconds.push_back(std::chrono::duration<double>(Clock::now() - began).count());
  times.norm = flush->norm;
  return head.AbortFlush(flush->flush_id);
}

absl::Status CheckNorm(const Tensor& gradient, const FlushTimes& times) {
  const double norm = NormOf(gradient);
  if (std::abs(norm - times.norm) <= kMostNormError * times.norm) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("a gradient of norm %g arrived as %s with norm %g", times.norm,
                                             Name(times.type), norm));
}

}  // namespace

absl::StatusOr<std::vector<FlushTimes>> TimeFlushes(const Head& head, int64_t count,
                                                    const std::atomic<bool>& interrupted) {
  const int64_t elements = head.config().vocab_size * head.config().hidden_size;
  std::vector<FlushTimes> all;
  std::vector<Tensor> gradients;
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
    all.push_back({.type = type, .bytes = elements * SizeOf(type)});
    gradients.emplace_back(type, elements);
  }
  for (int64_t round = 0; round <= count && !interrupted; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      if (absl::Status status = Read(head, gradients[i], all[i]); !status.ok()) return status;
      if (round > 0) continue;
      all[i].seconds.clear();
      if (absl::Status status = CheckNorm(gradients[i], all[i]); !status.ok()) return status;
    }
  }
  return all;
}

}  // namespace lossd::perf
