#include "server/telemetry/metrics.h"

#include <netdb.h>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/counters.h"
#include "server/engine/errors.h"
#include "server/engine/process_memory.h"
#include "server/version.h"

namespace lossd::telemetry {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

ClientMetric Labelled(Labels labels) {
  ClientMetric metric;
  metric.label = std::move(labels);
  return metric;
}

// Builds families in the order in which they are added.
class Families {
 public:
  void Begin(const std::string& name, const std::string& help, MetricType type) {
    families_.push_back({name, help, type, {}});
  }
  void Counter(Labels labels, uint64_t value) { Counter(std::move(labels), static_cast<double>(value)); }
  void Counter(Labels labels, double value) {
    ClientMetric metric = Labelled(std::move(labels));
    metric.counter.value = value;
    families_.back().metric.push_back(std::move(metric));
  }
  void Gauge(Labels labels, double value) {
    ClientMetric metric = Labelled(std::move(labels));
    metric.gauge.value = value;
    families_.back().metric.push_back(std::move(metric));
  }
  template <const auto& kBounds>
  void Histogram(Labels labels, const engine::Histogram<kBounds>& histogram) {
    ClientMetric metric = Labelled(std::move(labels));
    uint64_t cumulative = 0;
    for (size_t i = 0; i <= kBounds.size(); ++i) {
      cumulative += histogram.bucket(i);
      const double bound = i < kBounds.size() ? kBounds[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({cumulative, bound});
    }
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = histogram.sum();
    families_.back().metric.push_back(std::move(metric));
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  std::vector<MetricFamily> families_;
};

double ReadCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void CollectWork(const engine::Counters& counters, Families& families) {
  families.Begin("lossd_chunks_total", "Chunks read from streams, by what became of them.",
                 MetricType::Counter);
  families.Counter({{"outcome", "accumulated"}}, counters.chunks_accumulated);
  families.Counter({{"outcome", "input_gradient"}}, counters.chunks_input_gradient);
  families.Counter({{"outcome", "loss_only"}}, counters.chunks_loss_only);
  families.Counter({{"outcome", "repeated"}}, counters.chunks_repeated);
  families.Counter({{"outcome", "rejected"}}, counters.chunks_rejected);
  families.Counter({{"outcome", "refused"}}, counters.chunks_refused);
  families.Counter({{"outcome", "withdrawn"}}, counters.chunks_withdrawn);
  families.Begin("lossd_chunks_deferred_total", "Accumulated chunks that were answered before dW was made.",
                 MetricType::Counter);
  families.Counter({}, counters.chunks_deferred);
  families.Begin("lossd_tokens_total", "Tokens of accumulated and loss-only chunks.", MetricType::Counter);
  families.Counter({{"kind", "valid"}}, counters.tokens_valid);
  families.Counter({{"kind", "ignored"}}, counters.tokens_ignored);
  families.Begin("lossd_payload_bytes_total", "Tensor bytes of chunks and their answers.",
                 MetricType::Counter);
  families.Counter({{"direction", "in"}}, counters.payload_bytes_in);
  families.Counter({{"direction", "out"}}, counters.payload_bytes_out);
  families.Begin("lossd_rows_redone_total",
                 "Rows computed again because their exponent offset was out of range.", MetricType::Counter);
  families.Counter({}, counters.rows_redone);
  families.Begin("lossd_flushes_total", "Flushes of gradient windows, by phase reached.",
                 MetricType::Counter);
  families.Counter({{"phase", "begun"}}, counters.flushes_begun);
  families.Counter({{"phase", "committed"}}, counters.flushes_committed);
  families.Counter({{"phase", "aborted"}}, counters.flushes_aborted);
  families.Begin("lossd_steps_total",
                 "Steps of heads' optimizers; skipped: the gradient was not finite, and it was asked for.",
                 MetricType::Counter);
  families.Counter({{"outcome", "applied"}}, counters.steps_applied);
  families.Counter({{"outcome", "skipped"}}, counters.steps_skipped);
  families.Begin("lossd_weight_versions_total", "Weight versions published.", MetricType::Counter);
  families.Counter({}, counters.weight_versions);
  families.Begin("lossd_logits_calls_total", "Calls for logits that were answered.", MetricType::Counter);
  families.Counter({}, counters.logits_calls);
  families.Begin("lossd_logits_rows_total", "Rows of these calls.", MetricType::Counter);
  families.Counter({}, counters.logits_rows);
  families.Begin("lossd_rejected_total", "Chunks and calls that were refused, by reason.",
                 MetricType::Counter);
  for (int i = 0; i < engine::kRejectReasonCount; ++i) {
    families.Counter({{"reason", engine::Name(static_cast<engine::RejectReason>(i))}},
                     counters.rejected[static_cast<size_t>(i)]);
  }
}

void CollectBatches(const engine::Counters& counters, Families& families) {
  families.Begin("lossd_batch_chunks", "Chunks gathered into each batch that was started on the device.",
                 MetricType::Histogram);
  families.Histogram({}, counters.batch_chunks);
  families.Begin("lossd_batch_rows", "Tokens of each batch that was started on the device.",
                 MetricType::Histogram);
  families.Histogram({}, counters.batch_rows);
}

void CollectDurations(const engine::Counters& counters, Families& families) {
  families.Begin("lossd_chunk_seconds",
                 "Time of chunks by stage: queue (accepted until started), forward (until loss and dX), "
                 "weight_gradient (until dW).",
                 MetricType::Histogram);
  families.Histogram({{"stage", "queue"}}, counters.queue_seconds);
  families.Histogram({{"stage", "forward"}}, counters.forward_seconds);
  families.Histogram({{"stage", "weight_gradient"}}, counters.weight_gradient_seconds);
  families.Begin("lossd_flush_freeze_seconds", "Time from BeginFlush until the window is frozen.",
                 MetricType::Histogram);
  families.Histogram({}, counters.flush_seconds);
  families.Begin("lossd_step_seconds", "Time from ApplyStep until the next window is open.",
                 MetricType::Histogram);
  families.Histogram({}, counters.step_seconds);
  families.Begin("lossd_logits_seconds", "Time from a call for logits until they are computed.",
                 MetricType::Histogram);
  families.Histogram({}, counters.logits_seconds);
}

// At most --max_heads of each, and those that are being deleted.
void CollectMemoryOfHeads(const engine::Engine& engine, Families& families) {
  families.Begin("lossd_head_memory_reserved_bytes",
                 "The part of lossd_memory_reserved_bytes that is a head's, by purpose.", MetricType::Gauge);
  for (const auto& [head, items] : engine.budget().Usage().heads) {
    for (const engine::MemoryItem& item : items) {
      families.Gauge({{"head", head}, {"purpose", item.purpose}}, static_cast<double>(item.bytes));
    }
  }
  families.Begin("lossd_head_staging_reserved_bytes", "Credits of a head's open sessions.",
                 MetricType::Gauge);
  for (const auto& [head, bytes] : engine.StagingByHead()) {
    families.Gauge({{"head", head}}, static_cast<double>(bytes));
  }
  families.Begin("lossd_head_quota_bytes", "What one head may reserve with its sessions; 0: no quota.",
                 MetricType::Gauge);
  families.Gauge({}, static_cast<double>(engine.budget().head_quota()));
  const engine::DeviceTotals totals = engine.device().Totals();
  families.Begin("lossd_device_memory_bytes",
                 "Memory of the device, whoever uses it: all of it, and what is free. 0: it does not tell.",
                 MetricType::Gauge);
  families.Gauge({{"kind", "total"}}, static_cast<double>(totals.total_bytes));
  families.Gauge({{"kind", "free"}}, static_cast<double>(totals.free_bytes));
}

void CollectState(const engine::Engine& engine, Families& families) {
  const engine::Counters& counters = engine.counters();
  families.Begin("lossd_queued_chunks", "Chunks accepted and not yet started.", MetricType::Gauge);
  families.Gauge({}, static_cast<double>(counters.queued_chunks));
  families.Begin("lossd_credit_bytes",
                 "Payloads and answers under way: read, and not yet answered on the wire.",
                 MetricType::Gauge);
  families.Gauge({}, static_cast<double>(counters.credit_bytes));
  families.Begin("lossd_staging_reserved_bytes", "Credits of all open sessions.", MetricType::Gauge);
  families.Gauge({}, static_cast<double>(engine.staging_reserved()));
  families.Begin("lossd_staging_limit_bytes", "What the credits of all sessions may come to.",
                 MetricType::Gauge);
  families.Gauge({}, static_cast<double>(engine.options().staging_bytes));
  families.Begin("lossd_live_streams", "Compute streams.", MetricType::Gauge);
  families.Gauge({}, static_cast<double>(counters.live_streams));
  families.Begin("lossd_sessions", "Open sessions.", MetricType::Gauge);
  families.Gauge({}, static_cast<double>(engine.sessions()));
  families.Begin("lossd_heads", "Heads.", MetricType::Gauge);
  families.Gauge({}, static_cast<double>(engine.Heads().size()));
  families.Begin("lossd_draining", "1 while the server is shutting down.", MetricType::Gauge);
  families.Gauge({}, engine.draining() ? 1 : 0);
  families.Begin("lossd_memory_reserved_bytes", "Memory reserved on the device, by purpose.",
                 MetricType::Gauge);
  for (const engine::MemoryItem& item : engine.ReservedByPurpose()) {
    families.Gauge({{"purpose", item.purpose}}, static_cast<double>(item.bytes));
  }
  CollectMemoryOfHeads(engine, families);
  families.Begin("lossd_regions", "Regions of memory shared with clients on this host.", MetricType::Gauge);
  for (const engine::RegionKind kind : {engine::RegionKind::kSystem, engine::RegionKind::kDevice}) {
    families.Gauge({{"kind", engine::Name(kind)}}, static_cast<double>(engine.regions().usage(kind).regions));
  }
  families.Begin("lossd_region_bytes", "Their memory.", MetricType::Gauge);
  for (const engine::RegionKind kind : {engine::RegionKind::kSystem, engine::RegionKind::kDevice}) {
    families.Gauge({{"kind", engine::Name(kind)}}, static_cast<double>(engine.regions().usage(kind).bytes));
  }
  families.Begin("lossd_memory_limit_bytes", "What heads and the device may reserve in all.",
                 MetricType::Gauge);
  families.Gauge({}, static_cast<double>(engine.budget().limit()));
  const engine::ProcessMemory process = engine::ReadProcessMemory();
  families.Begin("process_resident_memory_bytes", "Resident memory of the process.", MetricType::Gauge);
  families.Gauge({}, static_cast<double>(process.resident_bytes));
  families.Begin("lossd_process_peak_memory_bytes", "Largest resident memory of the process.",
                 MetricType::Gauge);
  families.Gauge({}, static_cast<double>(process.peak_bytes));
  families.Begin("process_cpu_seconds_total", "Processor time of the process, user and system.",
                 MetricType::Counter);
  families.Counter({}, ReadCpuSeconds());
  families.Begin("process_start_time_seconds", "Start of the process, seconds since the epoch.",
                 MetricType::Gauge);
  families.Gauge({}, absl::ToDoubleSeconds(engine.started() - absl::UnixEpoch()));
  families.Begin("lossd_build_info", "Always 1; the labels say what runs.", MetricType::Gauge);
  families.Gauge({{"version", kVersion}, {"device", engine.device().name()}}, 1);
}

// Connects, and hangs up.
void Knock(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.empty() ? nullptr : host.c_str(), absl::StrCat(port).c_str(), &hints, &found) != 0) {
    return;
  }
  const int descriptor = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, 0);
  if (descriptor >= 0) {
    // Whether anybody still listens does not matter.
    (void)connect(descriptor, found->ai_addr, found->ai_addrlen);
    close(descriptor);
  }
  freeaddrinfo(found);
}

class Collector : public prometheus::Collectable {
 public:
  explicit Collector(const engine::Engine* engine) : engine_(engine) {}

  std::vector<MetricFamily> Collect() const override {
    Families families;
    CollectWork(engine_->counters(), families);
    CollectBatches(engine_->counters(), families);
    CollectDurations(engine_->counters(), families);
    CollectState(*engine_, families);
    return families.Take();
  }

 private:
  const engine::Engine* const engine_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& listen,
                                                                    const engine::Engine* engine,
                                                                    const ServiceCounters* /*counters*/) {
  std::unique_ptr<prometheus::Exposer> exposer;
  try {
    // A connection that says nothing holds a thread until it times out; scrapes go on beside a few of them.
    exposer = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", listen, "num_threads", "4", "request_timeout_ms", "2000"});
  } catch (const std::exception&) {  // the library's only way to say that it cannot listen
    return engine::MakeError(absl::StatusCode::kUnavailable, engine::RejectReason::kInternal,
                             "metrics_listen",
                             absl::StrCat("cannot listen on ", listen, " for metrics; is the port free?"));
  }
  auto collector = std::make_shared<Collector>(engine);
  exposer->RegisterCollectable(collector);
  const int port = exposer->GetListeningPorts().front();
  std::string host = listen.substr(0, listen.rfind(':'));
  if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return std::unique_ptr<MetricsServer>(
      new MetricsServer(std::move(exposer), std::move(collector), std::move(host), port));
}

MetricsServer::MetricsServer(std::unique_ptr<prometheus::Exposer> exposer,
                             std::shared_ptr<prometheus::Collectable> collector, std::string host, int port)
    : collector_(std::move(collector)), exposer_(std::move(exposer)), host_(std::move(host)), port_(port) {}

// The library's listening thread looks whether it should stop every 2 s, or when somebody connects.
MetricsServer::~MetricsServer() {
  std::atomic<bool> stopped = false;
  std::thread knocking([&] {
    while (!stopped) {
      Knock(host_, port_);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  exposer_.reset();
  stopped = true;
  knocking.join();
}

}  // namespace lossd::telemetry
