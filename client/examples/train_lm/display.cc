#include "client/examples/train_lm/display.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "absl/strings/str_format.h"
#include "client/examples/train_lm/results.h"

namespace lossd::train_lm {
namespace {

constexpr int64_t kBarWidth = 24;
constexpr int64_t kLines = 20;  // of a run that does not go to a terminal

std::string MinutesAndSeconds(double seconds) {
  const int64_t whole = std::lround(seconds);
  return absl::StrFormat("%d:%02d", whole / 60, whole % 60);
}

}  // namespace

Display::Display(Verbosity verbosity, int64_t steps)
    : verbosity_(verbosity),
      steps_(steps),
      terminal_(isatty(STDOUT_FILENO) != 0),
      start_(std::chrono::steady_clock::now()) {}

void Display::Say(const std::string& line) {
  if (verbosity_ == Verbosity::kQuiet) return;
  Erase();
  std::cout << line << '\n' << std::flush;
}

void Display::Show(const StepNews& news) {
  if (verbosity_ == Verbosity::kQuiet) return;
  const std::string facts = absl::StrFormat("step %d/%d  loss %.3f  %.0f tokens/s", news.step, steps_,
                                            news.loss, news.tokens_per_second);
  if (!terminal_) {
    const int64_t every = std::max<int64_t>(1, steps_ / kLines);
    if (news.step % every == 0 || news.step == 1 || news.step == steps_) {
      std::cout << facts << '\n' << std::flush;
    }
    return;
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
  const double left =
      spent.count() / static_cast<double>(news.step) * static_cast<double>(steps_ - news.step);
  const auto filled = static_cast<size_t>(kBarWidth * news.step / steps_);
  Erase();
  std::cout << '[' << std::string(filled, '#') << std::string(static_cast<size_t>(kBarWidth) - filled, '.')
            << "] " << facts << "  " << MinutesAndSeconds(left) << " left" << std::flush;
  drawn_ = true;
}

void Display::Show(const EvaluationNews& news) {
  Say(absl::StrFormat("step %d/%d  held-out perplexity %.1f (unigram %.1f)  peak of %s %s (full logits: %s)",
                      news.step, steps_, news.held_out_perplexity, news.unigram_perplexity, news.holder,
                      Mebibytes(news.holder_peak_bytes), Mebibytes(news.full_logits_bytes)));
}

void Display::Erase() {
  if (drawn_) std::cout << "\r\033[K";
  drawn_ = false;
}

}  // namespace lossd::train_lm
