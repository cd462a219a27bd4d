// Wiring: text, head, trainer, results. The parts say what they do in their headers; the main path is
// text_data -> trunk -> head (remote_head or local_head) -> trainer.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/examples/train_lm/display.h"
#include "client/examples/train_lm/local_head.h"
#include "client/examples/train_lm/options.h"
#include "client/examples/train_lm/remote_head.h"
#include "client/examples/train_lm/results.h"
#include "client/examples/train_lm/saved_run.h"
#include "client/examples/train_lm/text/text_data.h"
#include "client/examples/train_lm/trainer.h"
#include "client/tools/connection_options.h"

namespace lossd::train_lm {
namespace {

// An interrupted run stops after the step under way and takes its head off the server; a second signal ends
// it at once.
volatile std::sig_atomic_t stop_requested = 0;

void StopOnSignals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop_requested = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

absl::StatusOr<std::vector<Document>> ReadTexts(const Options& options) {
  const std::vector<std::string> paths =
      options.texts.empty() ? DefaultTextFiles(options.text_directory) : options.texts;
  std::vector<Document> documents;
  for (const std::string& path : paths) {
    absl::StatusOr<Document> document = ReadDocument(path);
    if (!document.ok() && options.texts.empty()) {
      return absl::NotFoundError(absl::StrCat(
          document.status().message(),
          "\n  The default text comes with three packages: apt-get install debian-reference-en debian-policy "
          "developers-reference\n  (container images often leave out /usr/share/doc: --text-dir names "
          "another folder)."
          "\n  Or train on text of your own: --text FILE..."));
    }
    if (!document.ok()) return document.status();
    documents.push_back(*std::move(document));
  }
  return documents;
}

// `saved`: null to begin.
absl::StatusOr<std::unique_ptr<LossHead>> OpenHead(const Options& options, const HeadShape& shape,
                                                   const SavedRun* saved, ThreadPool* pool) {
  if (options.place == HeadPlace::kThisProcess) {
    return std::make_unique<LocalHead>(shape, options.precision, options.trainer.adam(), pool);
  }
  if (!options.checkpoint_folder.empty()) {
    return RemoteHead::OpenResumable(options.server, options.connection, options.head_name, shape,
                                     options.precision, options.trainer.adam(),
                                     saved == nullptr ? std::nullopt : std::optional(saved->head_tag));
  }
  if (!options.head_name.empty()) {
    return RemoteHead::Open(options.server, options.connection, options.head_name, shape, options.precision,
                            options.trainer.adam(), HeadLifetime::kKept);
  }
  const std::string name = absl::StrCat("train_lm-", getpid(), "-", Clock::now().time_since_epoch().count());
  return RemoteHead::Open(options.server, options.connection, name, shape, options.precision,
                          options.trainer.adam(), HeadLifetime::kUntilClosed);
}

Results Begin(const Options& options, const TextData& data, Trainer& trainer) {
  Results results;
  results.unigram_perplexity = UnigramPerplexity(data.held_out, data.unigram);
  results.batch = options.trainer.batch;
  results.accumulate = options.trainer.accumulate;
  results.vocabulary = data.vocabulary;
  results.hidden = options.trainer.trunk.hidden;
  results.parameters = trainer.head_parameters() + trainer.trunk_parameters();
  results.head_parameters = trainer.head_parameters();
  results.training_text_tokens = static_cast<int64_t>(data.training.positions.size());
  results.held_out_tokens = static_cast<int64_t>(data.held_out.positions.size());
  results.removed_tokens = data.removed_tokens;
  results.shared_ngrams = data.shared_ngrams;
  results.held_out_chapters = data.held_out_chapters;
  results.seed = options.trainer.seed;
  const bool remote = options.place == HeadPlace::kServer;
  results.holder = remote ? "the server" : "this process";
  results.server = remote ? options.server : "";
  results.dtype = options.precision == HeadPrecision::kBFloat16 ? "bf16" : "fp32";
  return results;
}

void DescribeText(const TextData& data, Display* display) {
  display->Say(absl::StrFormat("held out:\n  %s", absl::StrJoin(data.held_out_chapters, "\n  ")));
  const size_t all = data.training.positions.size() + data.held_out.positions.size();
  display->Say(
      absl::StrFormat("tokens: %d to train on, %d held out (%.1f %%), vocabulary %d",
                      data.training.positions.size(), data.held_out.positions.size(),
                      100.0 * static_cast<double>(data.held_out.positions.size()) / static_cast<double>(all),
                      data.vocabulary));
  display->Say(absl::StrFormat("shared %d-grams: %d; %d training tokens removed; shared now: %d",
                               kSharedNgram, data.shared_ngrams_before, data.removed_tokens,
                               data.shared_ngrams));
}

absl::Status Evaluate(Trainer* trainer, LossHead* head, Display* display, Results* results) {
  absl::StatusOr<double> perplexity = trainer->HeldOutPerplexity();
  if (!perplexity.ok()) return perplexity.status();
  absl::StatusOr<HeadReport> report = head->Report();
  if (!report.ok()) return report.status();
  results->device = report->device;
  results->server_peak_bytes = report->peak_bytes;
  results->held_out_perplexity = *perplexity;
  results->evaluations.push_back({results->steps, *perplexity});
  display->Show(EvaluationNews{results->steps, *perplexity, results->unigram_perplexity, results->holder,
                               report->peak_bytes, results->FullLogitsBytes()});
  return absl::OkStatus();
}

// The settings that have to be the same for a saved run to go on. How often it is evaluated or saved is not
// among them.
std::string SettingsOf(const Options& options, const TextData& data) {
  const TrainerOptions& trainer = options.trainer;
  const TrunkConfig& trunk = trainer.trunk;
  return absl::StrCat(options.head_name, " ", data.vocabulary, " ", data.training.positions.size(), " ",
                      trainer.steps, " ", trainer.batch, " ", trainer.accumulate, " ", trainer.learning_rate,
                      " ", trainer.warm_up, " ", trainer.weight_decay, " ", trainer.seed, " ", trunk.hidden,
                      " ", trunk.embedding, " ", trunk.context, " ", trunk.history, " ",
                      trunk.feature_dropout, " ", trunk.hidden_dropout, " ",
                      static_cast<int>(options.precision));
}

constexpr char kEvenTag[] = "train_lm-0";
constexpr char kOddTag[] = "train_lm-1";

// First the head, then what names its tag: two tags take turns, so that the one which the file names, `tag`,
// is there.
absl::Status Save(const Options& options, const TextData& data, const Trainer& trainer, LossHead* head,
                  const Results& results, std::string* tag) {
  SavedRun run{.settings = SettingsOf(options, data),
               .head_tag = *tag == kEvenTag ? kOddTag : kEvenTag,
               .trainer = trainer.state(),
               .tokens = results.tokens,
               .training_seconds = results.training_seconds,
               .losses = results.losses,
               .evaluations = {}};
  for (const Evaluation& evaluation : results.evaluations) {
    run.evaluations.emplace_back(evaluation.step, evaluation.held_out_perplexity);
  }
  if (absl::Status saved = head->Save(run.head_tag); !saved.ok()) return saved;
  if (absl::Status written = WriteSavedRun(options.checkpoint_folder, run); !written.ok()) return written;
  *tag = run.head_tag;
  return absl::OkStatus();
}

absl::Status Resume(const SavedRun& run, Trainer* trainer, Results* results) {
  results->steps = run.trainer.steps;
  results->tokens = run.tokens;
  results->training_seconds = run.training_seconds;
  results->losses = run.losses;
  for (const auto& [step, perplexity] : run.evaluations) results->evaluations.push_back({step, perplexity});
  return trainer->Resume(run.trainer);
}

// `tag`: of the head that was last saved.
absl::Status Train(const Options& options, const TextData& data, Trainer* trainer, LossHead* head,
                   std::string tag, Display* display, Results* results) {
  const int64_t steps = options.trainer.steps;
  const int64_t evaluate_every = steps / (options.evaluations + 1) + 1;
  for (int64_t step = results->steps + 1; step <= steps; ++step) {
    const Clock::time_point step_start = Clock::now();
    const HeadTraffic before = head->Traffic();
    absl::StatusOr<double> loss = trainer->Step();
    if (!loss.ok()) return loss.status();
    results->steps = step;
    results->tokens += options.trainer.batch * options.trainer.accumulate;
    results->training_seconds += SecondsSince(step_start);
    results->losses.push_back(*loss);
    const HeadTraffic after = head->Traffic();
    results->bytes_sent += after.sent - before.sent;
    results->bytes_received += after.received - before.received;
    ++results->steps_with_traffic;
    if (stop_requested != 0) return absl::CancelledError(absl::StrCat("stopped after step ", step));
    display->Show(StepNews{step, *loss, results->TokensPerSecond()});
    if (step % evaluate_every == 0 && step != steps) {
      if (absl::Status evaluated = Evaluate(trainer, head, display, results); !evaluated.ok()) {
        return evaluated;
      }
    }
    if (!options.checkpoint_folder.empty() && step % options.checkpoint_every == 0) {
      if (absl::Status saved = Save(options, data, *trainer, head, *results, &tag); !saved.ok()) return saved;
    }
  }
  return Evaluate(trainer, head, display, results);
}

// From where the run was saved, if it was, to its end.
absl::Status TrainToTheEnd(const Options& options, const TextData& data, ThreadPool* pool, Display* display,
                           Results* results) {
  std::optional<SavedRun> saved;
  if (!options.checkpoint_folder.empty()) {
    absl::StatusOr<std::optional<SavedRun>> read = ReadSavedRun(options.checkpoint_folder);
    if (!read.ok()) return read.status();
    saved = *std::move(read);
    if (saved.has_value() && saved->settings != SettingsOf(options, data)) {
      return absl::InvalidArgumentError(absl::StrCat("--checkpoint-dir ", options.checkpoint_folder,
                                                     " holds a run with other settings or another text"));
    }
  }
  absl::StatusOr<std::unique_ptr<LossHead>> head =
      OpenHead(options, {.vocabulary = data.vocabulary, .hidden = options.trainer.trunk.hidden},
               saved.has_value() ? &*saved : nullptr, pool);
  if (!head.ok()) return head.status();
  Trainer trainer(options.trainer, data, head->get(), pool);
  *results = Begin(options, data, trainer);
  std::string tag = saved.has_value() ? saved->head_tag : "";
  if (saved.has_value()) {
    if (absl::Status resumed = Resume(*saved, &trainer, results); !resumed.ok()) return resumed;
    display->Say(absl::StrFormat("going on behind step %d", results->steps));
  } else {
    if (absl::Status started = trainer.Start(); !started.ok()) return started;
    if (!options.checkpoint_folder.empty()) {
      absl::Status first = Save(options, data, trainer, head->get(), *results, &tag);
      if (!first.ok()) return first;
    }
  }
  return Train(options, data, &trainer, head->get(), std::move(tag), display, results);
}

// What a server that was killed, and has restored what it could, answers to a run that is ahead of it.
bool MayGoBack(const absl::Status& status) {
  return IsWindowLost(status) || absl::IsNotFound(status) || absl::IsAborted(status) ||
         absl::IsFailedPrecondition(status) || absl::IsUnavailable(status);
}

absl::Status Run(Options options) {
  absl::StatusOr<std::vector<Document>> documents = ReadTexts(options);
  if (!documents.ok()) return documents.status();
  TrunkConfig& trunk = options.trainer.trunk;
  trunk.history = std::max(trunk.history, trunk.context);
  absl::StatusOr<TextData> data =
      PrepareText(*documents, {.vocabulary = options.vocabulary, .padding = trunk.history});
  if (!data.ok()) return data.status();
  if (stop_requested != 0) return absl::CancelledError("stopped before the first step");
  if (options.trainer.steps == 0) {
    const auto tokens_a_step = static_cast<double>(options.trainer.batch * options.trainer.accumulate);
    const auto tokens = static_cast<double>(data->training.positions.size());
    options.trainer.steps = std::max<int64_t>(1, std::llround(options.epochs * tokens / tokens_a_step));
  }

  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  ThreadPool pool(options.threads > 0 ? options.threads : cores);
  Results results;
  Display display(options.verbosity, options.trainer.steps);
  DescribeText(*data, &display);
  const Clock::time_point start = Clock::now();
  constexpr int kMostFruitless = 5;
  int64_t furthest = -1;
  for (int fruitless = 0;;) {
    absl::Status trained = TrainToTheEnd(options, *data, &pool, &display, &results);
    if (trained.ok()) break;
    fruitless = results.steps > furthest ? 0 : fruitless + 1;
    furthest = std::max(furthest, results.steps);
    if (options.checkpoint_folder.empty() || !MayGoBack(trained) || fruitless == kMostFruitless) {
      return trained;
    }
    display.Say(absl::StrCat("back to where the run was saved: ", trained.message()));
  }
  results.seconds = SecondsSince(start);
  std::cout << SummaryTable(results) << std::flush;
  return options.json.empty() ? absl::OkStatus() : WriteJson(results, options.json);
}

}  // namespace
}  // namespace lossd::train_lm

int main(int argc, char** argv) {
  lossd::tools::PrepareGrpc();
  lossd::train_lm::ParsedOptions parsed = lossd::train_lm::ParseOptions(argc, argv);
  if (!parsed.options.has_value()) return parsed.exit_code;
  lossd::train_lm::StopOnSignals();
  const absl::Status status = lossd::train_lm::Run(*std::move(parsed.options));
  if (status.ok()) return 0;
  std::cerr << "train_lm: " << status.message() << '\n';
  constexpr int kInterrupted = 130;  // what a shell reports after Ctrl-C
  return absl::IsCancelled(status) ? kInterrupted : 1;
}
