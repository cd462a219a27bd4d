#include "server/telemetry/metrics/exposition.h"

#include <string>

namespace lossd::telemetry {

void Exposition::Begin(const Metric& metric) {
  metric_ = &metric;
  families_.push_back({metric.name, metric.help, metric.type, {}});
}

prometheus::ClientMetric& Exposition::NewSample(LabelValues values) {
  prometheus::ClientMetric& sample = families_.back().metric.emplace_back();
  const char* const* name = metric_->labels.data();
  for (const std::string_view value : values) sample.label.push_back({*name++, std::string(value)});
  if (!rank_.empty()) sample.label.push_back({"rank", rank_});
  return sample;
}

void Exposition::AddValue(LabelValues labels, double value) {
  prometheus::ClientMetric& sample = NewSample(labels);
  (metric_->type == kCounter ? sample.counter.value : sample.gauge.value) = value;
}

}  // namespace lossd::telemetry
