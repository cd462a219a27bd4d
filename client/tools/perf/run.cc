#include "client/tools/perf/run.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tools/own_head.h"
#include "client/tools/perf/flushes.h"
#include "client/tools/perf/load.h"
#include "client/tools/perf/metrics.h"
#include "client/tools/perf/problem.h"
#include "client/tools/perf/report.h"
#include "client/tools/perf/server_process.h"
#include "lossd/client.h"

namespace lossd::perf {
namespace {

using tools::ProgressBar;

Outcome Problem(ExitCode code, const absl::Status& status) {
  return {.exit_code = code,
          .problem = absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message())};
}

// One line of what the clients do, redrawn on a terminal.
class LoadLine {
 public:
  LoadLine(const Settings& settings, ProgressBar::Style style) : tokens_(settings.tokens), style_(style) {
    next_ = Clock::now() + interval();
  }
  ~LoadLine() {
    if (drawn_ && style_ == ProgressBar::Style::kBar) std::fputs("\r\033[K", stderr);
  }
  LoadLine(const LoadLine&) = delete;
  LoadLine& operator=(const LoadLine&) = delete;

  void Show(const LoadProgress& progress) {
    const Clock::time_point now = Clock::now();
    if (style_ == ProgressBar::Style::kSilent || now < next_) return;
    next_ = now + interval();
    drawn_ = true;
    std::string line = "warming up";
    if (progress.phase == LoadProgress::Phase::kMeasuring) {
      const double rate = static_cast<double>(progress.batches * tokens_) / progress.seconds;
      line = absl::StrFormat("measuring %3.0f %%  %.1f s  %d batches  %.0f tokens/s", progress.fraction * 100,
                             progress.seconds, progress.batches, rate);
    }
    if (progress.failures > 0) absl::StrAppend(&line, "  ", progress.failures, " failures");
    const bool bar = style_ == ProgressBar::Style::kBar;
    std::fputs(absl::StrCat(bar ? "\r\033[K" : "", line, bar ? "" : "\n").c_str(), stderr);
  }

 private:
  std::chrono::milliseconds interval() const {
    return style_ == ProgressBar::Style::kBar ? std::chrono::milliseconds(200) : std::chrono::seconds(5);
  }

  const int64_t tokens_;
  const ProgressBar::Style style_;
  bool drawn_ = false;
  Clock::time_point next_;
};

absl::Status WriteWeights(const Head& head, const Tensor& weights, ProgressBar::Style style) {
  ProgressBar bar("writing weights", style);
  return head
      .WriteWeights(weights.type(), weights.data(),
                    [&bar](int64_t done, int64_t total) { bar.Update(done, total); })
      .status();
}

// The first batch, whose answer is looked at in full.
absl::StatusOr<Check> FirstAnswer(const Settings& settings, Client& client, const Head& head,
                                  const Tensor& weights) {
  auto session = head.OpenSession(SessionOptionsOf(settings));
  if (!session.ok()) return session.status();
  Inputs inputs(settings, settings.seed);
  Outputs outputs(settings);
  if (absl::Status status = Share(client, settings, inputs); !status.ok()) return status;
  if (absl::Status status = Share(client, settings, outputs); !status.ok()) return status;
  const auto answer = Compute(*session, settings, inputs, outputs);
  if (!answer.ok()) return answer.status();
  if (absl::Status status = session->Close(); !status.ok()) return status;
  if (absl::Status status = Fetch(outputs); !status.ok()) return status;
  return CheckAnswer(settings, weights, inputs, outputs);
}

// Reads processor times and the server's metrics, before and after.
class Readings {
 public:
  Readings(const ServerProcess* server, std::string metrics)
      : server_(server), metrics_(std::move(metrics)) {}

  void Take(Findings& findings, double Span<double>::*when, Metrics Span<Metrics>::*metrics_when) {
    findings.client_cpu.*when = OwnCpuSeconds();
    if (server_ != nullptr) {
      if (!findings.server_cpu) findings.server_cpu.emplace();
      *findings.server_cpu.*when = CpuSecondsOf(server_->pid());
    }
    if (metrics_.empty()) return;
    auto read = ReadMetrics(metrics_);
    if (!read.ok()) {
      status_ = read.status();
      return;
    }
    if (!findings.metrics) findings.metrics.emplace();
    *findings.metrics.*metrics_when = *std::move(read);
  }
  const absl::Status& status() const { return status_; }

 private:
  const ServerProcess* const server_;
  const std::string metrics_;
  absl::Status status_;
};

Outcome Measure(const Settings& settings, const Head& head, Client& client, const ServerProcess* server,
                ProgressBar::Style style, Findings& findings, const std::atomic<bool>& interrupted) {
  const std::string metrics = server != nullptr ? server->metrics() : settings.metrics;
  Readings readings(server, metrics);
  {
    LoadLine line(settings, style);
    LoadHooks hooks;
    hooks.before = [&] { readings.Take(findings, &Span<double>::before, &Span<Metrics>::before); };
    hooks.after = [&] { readings.Take(findings, &Span<double>::after, &Span<Metrics>::after); };
    hooks.progress = [&line](const LoadProgress& progress) { line.Show(progress); };
    findings.load = RunLoad(settings, client, head, hooks, interrupted);
  }
  if (!readings.status().ok()) {
    std::fprintf(stderr, "lossd-perf: no time in stages: %s\n",
                 std::string(readings.status().message()).c_str());
    findings.metrics.reset();
  }
  if (settings.flushes > 0) {
    auto flushes = TimeFlushes(head, settings.flushes, interrupted);
    if (!flushes.ok()) return Problem(ExitCode::kFailed, flushes.status());
    findings.flushes = *std::move(flushes);
  }
  if (auto memory = client.Memory(); memory.ok()) findings.memory = *std::move(memory);
  return {.exit_code = Failed(findings.load) ? ExitCode::kFailed : ExitCode::kOk,
          .problem = "",
          .report = Report(settings, findings)};
}

}  // namespace

Outcome Run(const Settings& settings, ProgressBar::Style style, const std::atomic<bool>& interrupted) {
  std::unique_ptr<ServerProcess> server;
  Findings findings{.target = settings.target};
  if (settings.target.empty()) {
    auto started = ServerProcess::Start(settings);
    if (!started.ok()) return Problem(ExitCode::kUnreachable, started.status());
    server = *std::move(started);
    findings.target = server->target();
  }
  const auto timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(settings.timeout));
  ClientOptions options{.call_timeout = timeout, .reconnect_timeout = timeout};
  settings.connection.SetIn(options);
  if (server != nullptr) options.tls = server->tls();
  auto client = Client::Connect(findings.target, options);
  if (!client.ok()) return Problem(ExitCode::kUnreachable, tools::NameFlags(client.status()));
  const auto status = (*client)->Status();
  if (!status.ok()) return Problem(ExitCode::kUnreachable, status.status());
  findings.server_version = status->version;
  findings.device = status->device_description;

  const std::string name =
      absl::StrFormat("lossd-perf-%d-%x", getpid(), Clock::now().time_since_epoch().count());
  auto head = (*client)->CreateHead({.name = name,
                                     .vocab_size = settings.vocab,
                                     .hidden_size = settings.hidden,
                                     .weight_type = settings.weight_type});
  if (!head.ok()) return Problem(ExitCode::kFailed, head.status());
  const auto remove =
      absl::MakeCleanup([&client, &name] { tools::DeleteOwnHead(**client, name, "lossd-perf"); });
  {
    const Tensor weights = RandomWeights(settings);
    if (absl::Status written = WriteWeights(*head, weights, style); !written.ok()) {
      return Problem(ExitCode::kFailed, written);
    }
    const auto check = FirstAnswer(settings, **client, *head, weights);
    if (!check.ok()) return Problem(ExitCode::kFailed, check.status());
    findings.check = *check;
  }
  return Measure(settings, *head, **client, server.get(), style, findings, interrupted);
}

}  // namespace lossd::perf
