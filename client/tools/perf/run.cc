#include "client/tools/perf/run.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tools/own_head.h"
#include "client/tools/perf/comparison.h"
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
      *findings.server_cpu.*when = CpuSecondsOf(server_->pids());
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

// A server with a head that has its weights and has answered right.
class Subject {
 public:
  Subject(Settings settings, ProgressBar::Style style) : settings_(std::move(settings)), style_(style) {}
  ~Subject() {
    if (head_) tools::DeleteOwnHead(*client_, name_, "lossd-perf");
  }
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  // Once, before Measure. Its outcome has no report.
  Outcome Prepare(const Tensor& weights) {
    if (Outcome outcome = Connect(); !outcome.problem.empty()) return outcome;
    name_ = absl::StrFormat("lossd-perf-%d-%x", getpid(), Clock::now().time_since_epoch().count());
    auto head = client_->CreateHead({.name = name_,
                                     .vocab_size = settings_.vocab,
                                     .hidden_size = settings_.hidden,
                                     .weight_type = settings_.weight_type});
    if (!head.ok()) return Problem(ExitCode::kFailed, head.status());
    head_ = *std::move(head);
    if (absl::Status written = WriteWeights(*head_, weights, style_); !written.ok()) {
      return Problem(ExitCode::kFailed, written);
    }
    const auto check = FirstAnswer(settings_, *client_, *head_, weights);
    if (!check.ok()) return Problem(ExitCode::kFailed, check.status());
    findings_.check = *check;
    return {};
  }

  Outcome Measure(const std::atomic<bool>& interrupted) const {
    Findings findings = findings_;
    Readings readings(server_.get(), server_ != nullptr ? server_->metrics() : settings_.metrics);
    {
      LoadLine line(settings_, style_);
      LoadHooks hooks;
      hooks.before = [&] { readings.Take(findings, &Span<double>::before, &Span<Metrics>::before); };
      hooks.after = [&] { readings.Take(findings, &Span<double>::after, &Span<Metrics>::after); };
      hooks.progress = [&line](const LoadProgress& progress) { line.Show(progress); };
      findings.load = RunLoad(settings_, *client_, *head_, hooks, interrupted);
    }
    if (!readings.status().ok()) {
      std::fprintf(stderr, "lossd-perf: no time in stages: %s\n",
                   std::string(readings.status().message()).c_str());
      findings.metrics.reset();
    }
    if (settings_.flushes > 0) {
      auto flushes = TimeFlushes(*head_, settings_.flushes, interrupted);
      if (!flushes.ok()) return Problem(ExitCode::kFailed, flushes.status());
      findings.flushes = *std::move(flushes);
    }
    if (auto memory = client_->Memory(); memory.ok()) findings.memory = *std::move(memory);
    return {.exit_code = Failed(findings.load) ? ExitCode::kFailed : ExitCode::kOk,
            .problem = "",
            .report = Report(settings_, findings)};
  }

 private:
  // With a server of its own, if none is named.
  Outcome Connect() {
    findings_.target = settings_.target;
    if (settings_.target.empty()) {
      auto started = ServerProcess::Start(settings_);
      if (!started.ok()) return Problem(ExitCode::kUnreachable, started.status());
      server_ = *std::move(started);
      findings_.target = server_->target();
    }
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::duration<double>(settings_.timeout));
    ClientOptions options{.call_timeout = timeout, .reconnect_timeout = timeout};
    settings_.connection.SetIn(options);
    if (server_ != nullptr) options.tls = server_->tls();
    auto client = Client::Connect(findings_.target, options);
    if (!client.ok()) return Problem(ExitCode::kUnreachable, tools::NameFlags(client.status()));
    client_ = *std::move(client);
    const auto status = client_->Status();
    if (!status.ok()) return Problem(ExitCode::kUnreachable, status.status());
    findings_.server_version = status->version;
    findings_.device = status->device_description;
    return {};
  }

  const Settings settings_;
  const ProgressBar::Style style_;
  Findings findings_;  // what is known before it is measured
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Client> client_;
  std::string name_;
  std::optional<Head> head_;
};

void Announce(ProgressBar::Style style, const std::string& what) {
  if (style != ProgressBar::Style::kSilent) std::fprintf(stderr, "%s\n", what.c_str());
}

}  // namespace

Outcome Run(const Settings& settings, ProgressBar::Style style, const std::atomic<bool>& interrupted) {
  Subject subject(settings, style);
  if (Outcome outcome = subject.Prepare(RandomWeights(settings)); !outcome.problem.empty()) return outcome;
  return subject.Measure(interrupted);
}

Outcome RunOverDevices(const Settings& settings, ProgressBar::Style style,
                       const std::atomic<bool>& interrupted) {
  Settings alone = settings;
  alone.device = FirstDevice(settings);
  alone.devices.clear();
  alone.replicas = 1;
  Subject over(settings, style);
  Subject one(alone, style);
  {
    const Tensor weights = RandomWeights(settings);
    for (Subject* subject : {&over, &one}) {
      if (Outcome outcome = subject->Prepare(weights); !outcome.problem.empty()) return outcome;
    }
  }
  Outcome whole;
  std::vector<nlohmann::ordered_json> reports_of_one;
  std::vector<nlohmann::ordered_json> reports_over;
  // A processor or a card slows down as it heats up: who went first goes second in the next round.
  for (int64_t turn = 0; turn < 2 * settings.rounds && !interrupted; ++turn) {
    const bool is_one = turn % 4 == 0 || turn % 4 == 3;
    Announce(style, absl::StrFormat("round %d of %d: %s", turn / 2 + 1, settings.rounds,
                                    is_one ? alone.device : settings.devices));
    Outcome outcome = (is_one ? one : over).Measure(interrupted);
    if (!outcome.problem.empty()) return outcome;
    if (outcome.exit_code != ExitCode::kOk) whole.exit_code = outcome.exit_code;
    (is_one ? reports_of_one : reports_over).push_back(std::move(outcome.report));
  }
  whole.report =
      Compare({alone.device, std::move(reports_of_one)}, {settings.devices, std::move(reports_over)});
  return whole;
}

}  // namespace lossd::perf
