// Metrics as they are written down: what each is called and means, and its values at one moment.
#ifndef LOSSD_SERVER_TELEMETRY_METRICS_EXPOSITION_H_
#define LOSSD_SERVER_TELEMETRY_METRICS_EXPOSITION_H_

#include <prometheus/metric_family.h>
#include <prometheus/metric_type.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/engine/common/counters.h"
#include "server/engine/device/device_report.h"

namespace lossd::telemetry {

inline constexpr auto kCounter = prometheus::MetricType::Counter;
inline constexpr auto kGauge = prometheus::MetricType::Gauge;
inline constexpr auto kHistogram = prometheus::MetricType::Histogram;

// Everything about a metric but its values. docs/metrics.md says the same at more length.
struct Metric {
  const char* name;
  const char* help;
  prometheus::MetricType type;
  std::array<const char*, 3> labels = {};  // null: no more
};

using LabelValues = std::initializer_list<std::string_view>;  // in the order of Metric::labels

// Collects metrics in the order in which they are begun.
class Exposition {
 public:
  // Values that are added from now on belong to this metric.
  void Begin(const Metric& metric);
  // Begins a metric and calls `add` with each rank, which adds its values. In a group they get a last label
  // `rank`.
  template <typename AddRank>
  void OfEachRank(const Metric& metric, const engine::GroupReport& group, const AddRank& add) {
    Begin(metric);
    for (size_t rank = 0; rank < group.ranks.size(); ++rank) {
      if (group.IsGroup()) rank_ = std::to_string(rank);
      add(group.ranks[rank]);
    }
    rank_.clear();
  }

  // A counter's or a gauge's value.
  template <typename Number>
  requires std::integral<Number> || std::floating_point<Number>
  void Add(LabelValues labels, Number value) { AddValue(labels, static_cast<double>(value)); }
  void Add(LabelValues labels, const engine::Counter& counter) { Add(labels, counter.load()); }
  void Add(LabelValues labels, const engine::Gauge& gauge) { Add(labels, gauge.load()); }

  // An engine::Histogram, or what was read of one.
  template <typename Histogram>
  requires requires { Histogram::kBounds; }
  void Add(LabelValues labels, const Histogram& histogram) {
    constexpr auto& kBounds = Histogram::kBounds;
    prometheus::ClientMetric::Histogram& out = NewSample(labels).histogram;
    uint64_t cumulative = 0;
    for (size_t i = 0; i <= kBounds.size(); ++i) {
      cumulative += histogram.bucket(i);
      const double bound = i < kBounds.size() ? kBounds[i] : std::numeric_limits<double>::infinity();
      out.bucket.push_back({cumulative, bound});
    }
    out.sample_count = cumulative;
    out.sample_sum = histogram.sum();
  }

  // A metric of one value.
  template <typename Value>
  void Only(const Metric& metric, const Value& value) {
    Begin(metric);
    Add({}, value);
  }

  std::vector<prometheus::MetricFamily> Take() { return std::move(families_); }

 private:
  prometheus::ClientMetric& NewSample(LabelValues values);
  void AddValue(LabelValues labels, double value);

  const Metric* metric_ = nullptr;  // that was begun last
  std::string rank_;                // of what is added; empty: no label
  std::vector<prometheus::MetricFamily> families_;
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_METRICS_EXPOSITION_H_
