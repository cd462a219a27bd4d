// lossctl step, lossctl gradient-stats
#include <cmath>
#include <memory>
#include <utility>

#include "CLI/Option.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/errors.h"
#include "client/tools/lossctl/head_info.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

enum class Window { kOpenOne, kNamed };

// Whether a step of `head` can ever be made, as it is.
bool TakesSteps(const HeadInfo& head) {
  return head.config.optimizer.kind != OptimizerKind::kNone && head.weight_version > 0;
}

std::string StepAdvice(const absl::Status& status, const HeadInfo& head, Window window) {
  switch (status.code()) {
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
      if (!TakesSteps(head)) return "";
      if (window == Window::kNamed) {
        return "look at the head's generation before another step: lossctl head list";
      }
      return "is a trainer still sending, or stepping itself? nothing changed: run it again when the step is "
             "done";
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return "it may have been done: repeat it with --generation, which never makes two steps of one";
    default:
      return "";
  }
}

// JSON has no numbers that are not finite.
nlohmann::ordered_json Number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nullptr;
}

struct WindowOf {
  Head head;
  HeadInfo info;
};

absl::StatusOr<WindowOf> Find(Client& client, const std::string& name) {
  auto head = client.GetHead(name);
  if (!head.ok()) return WithAdvice(head.status(), NotFoundAdvice(head.status()));
  auto info = head->Info();
  if (!info.ok()) return info.status();
  return WindowOf{*std::move(head), *std::move(info)};
}

absl::Status Step(const Context& context, const std::string& name, StepOptions options) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto window = Find(**client, name);
  if (!window.ok()) return window.status();
  const Window named = options.generation.has_value() ? Window::kNamed : Window::kOpenOne;
  // The window that the marks are of, whatever happens meanwhile.
  if (!options.generation.has_value()) options.generation = window->info.generation;
  // The marks of a step that was taken are not known any more, and need not be.
  if (*options.generation < window->info.generation) window->info.sessions.clear();
  const auto step = window->head.ApplyStep(options, window->info.sessions);
  if (!step.ok()) return WithAdvice(step.status(), StepAdvice(step.status(), window->info, named));

  const auto tokens = WithCommas(static_cast<int64_t>(step->window_tokens));
  std::string text;
  if (step->skipped && step->window_tokens == 0) {
    absl::StrAppend(&text, "Skipped the step of generation ", *options.generation, " of head '", name,
                    "': no token is in its window.\n", "  The weights stay version ", step->weight_version,
                    "; generation ", step->generation, " begins.\n");
  } else if (step->skipped) {
    absl::StrAppend(&text, "Skipped the step of generation ", *options.generation, " of head '", name,
                    "': ", WithCommas(step->non_finite), " elements of the gradient are NaN or infinite.\n",
                    "  The weights stay version ", step->weight_version, "; ", tokens,
                    " tokens are given up, generation ", step->generation, " begins.\n");
  } else {
    absl::StrAppend(&text, "Step ", step->step, " of head '", name, "' consumed generation ",
                    *options.generation, ": the weights are version ", step->weight_version, " now.\n");
    absl::StrAppendFormat(&text, "  norm %.9g over %s tokens; generation %d begins.\n", step->norm, tokens,
                          step->generation);
    if (window->head.config().bias) {
      absl::StrAppendFormat(&text, "  With the bias's gradient, norm %.9g.\n", step->bias_norm);
    }
    if (step->non_finite > 0) {
      absl::StrAppend(&text, "  WARNING: ", WithCommas(step->non_finite),
                      " elements of the gradient were NaN or infinite, and so is a part of the weights.\n");
    }
  }
  nlohmann::ordered_json json = {{"head", name},
                                 {"generation", *options.generation},
                                 {"next_generation", step->generation},
                                 {"weight_version", step->weight_version},
                                 {"step", step->step},
                                 {"skipped", step->skipped},
                                 {"norm", Number(step->norm)},
                                 {"non_finite", step->non_finite},
                                 {"window_tokens", step->window_tokens}};
  if (window->head.config().bias) json["bias_norm"] = Number(step->bias_norm);
  context.Print(json, text);
  return absl::OkStatus();
}

absl::Status Stats(const Context& context, const std::string& name, double scale) {
  auto client = context.Connect();
  if (!client.ok()) return client.status();
  auto window = Find(**client, name);
  if (!window.ok()) return window.status();
  const auto stats = window->head.GradientStats(window->info.sessions, scale);
  if (!stats.ok()) {
    const bool may_pass = absl::IsFailedPrecondition(stats.status()) && !window->info.config.frozen;
    return WithAdvice(stats.status(), may_pass ? "is a trainer still sending?" : "");
  }
  std::string text = absl::StrFormat("Gradient of generation %d of head '%s': norm %.9g over %s tokens.\n",
                                     window->info.generation, name, stats->norm,
                                     WithCommas(static_cast<int64_t>(stats->window_tokens)));
  absl::StrAppendFormat(&text, "  Largest element %.9g; %s are NaN or infinite.\n", stats->largest,
                        WithCommas(stats->non_finite));
  nlohmann::ordered_json json = {{"head", name},
                                 {"generation", window->info.generation},
                                 {"norm", Number(stats->norm)},
                                 {"largest", stats->largest},
                                 {"non_finite", stats->non_finite},
                                 {"window_tokens", stats->window_tokens}};
  if (window->head.config().bias) {
    absl::StrAppendFormat(&text, "  Of the bias, norm %.9g.\n", stats->bias_norm);
    json["bias_norm"] = Number(stats->bias_norm);
  }
  context.Print(json, text);
  return absl::OkStatus();
}

void AddOverrides(CLI::App& command, StepOptions& options) {
  const auto add = [&command](const char* name, std::optional<double>& value, const char* description) {
    command.add_option(name, value, description)->type_name("NUMBER");
  };
  add("--weight-decay", options.weight_decay, "For this step (default: the head's)");
  add("--momentum", options.momentum, "For this step, of sgd (default: the head's)");
  add("--beta1", options.beta1, "For this step, of adam and adamw (default: the head's)");
  add("--beta2", options.beta2, "For this step, of adam and adamw (default: the head's)");
}

}  // namespace

void AddStepCommand(CLI::App& app, Context& context) {
  struct Options {
    std::string name;
    StepOptions step;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("step", "Have the server's optimizer consume a head's gradient and start anew");
  command->add_option("NAME", options->name, "Name of the head")->required()->type_name("HEAD");
  command->add_option("--lr", options->step.learning_rate, "Learning rate of this step")
      ->required()
      ->type_name("NUMBER");
  command
      ->add_option("--gradient-scale", options->step.gradient_scale,
                   "Multiplies the gradient first: 1 / tokens, a clip coefficient (default: 1)")
      ->type_name("NUMBER");
  command->add_flag("--skip-non-finite", options->step.skip_non_finite,
                    "Leave the weights as they are if the gradient has NaN or infinite elements");
  AddOverrides(*command, options->step);
  command
      ->add_option("--generation", options->step.generation,
                   "The window to consume (default: the one that is open); repeated, it is no second step")
      ->type_name("NUMBER");
  AddCommonOptions(*command, context);
  command->footer(
      "For heads that were created with --optimizer. Everything accepted so far is in the step, exactly "
      "once.\n\n"
      "Examples:\n"
      "  lossctl step lm_head --lr 1e-3\n"
      "  lossctl step lm_head --lr 3e-4 --gradient-scale 6.1e-5 --skip-non-finite --json | jq .norm\n");
  command->callback([&context, options] {
    context.run = [&context, options] { return Step(context, options->name, options->step); };
  });
}

void AddGradientStatsCommand(CLI::App& app, Context& context) {
  struct Options {
    std::string name;
    double scale = 1;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("gradient-stats", "Show norm and health of a head's gradient");
  command->add_option("NAME", options->name, "Name of the head")->required()->type_name("HEAD");
  command->add_option("--gradient-scale", options->scale, "What it is multiplied by (default: 1)")
      ->type_name("NUMBER");
  AddCommonOptions(*command, context);
  command->footer(
      "Nothing moves and nothing changes; the gradient stays at the server.\n\n"
      "Examples:\n"
      "  lossctl gradient-stats lm_head\n"
      "  lossctl gradient-stats lm_head --json | jq .non_finite\n");
  command->callback([&context, options] {
    context.run = [&context, options] { return Stats(context, options->name, options->scale); };
  });
}

}  // namespace lossd::tools
