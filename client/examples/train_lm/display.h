// What is shown while training: a bar that is redrawn on a terminal, a line now and then elsewhere.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_DISPLAY_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_DISPLAY_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "client/examples/train_lm/options.h"

namespace lossd::train_lm {

struct StepNews {
  int64_t step = 0;  // from 1
  double loss = 0;
  double tokens_per_second = 0;
};

struct EvaluationNews {
  int64_t step = 0;
  double held_out_perplexity = 0;
  double unigram_perplexity = 0;
  std::string holder;  // what holds the head: "the server" or "this process"
  int64_t holder_peak_bytes = 0;
  int64_t full_logits_bytes = 0;
};

// Writes to standard output; from one thread.
class Display {
 public:
  Display(Verbosity verbosity, int64_t steps);

  void Say(const std::string& line);
  void Show(const StepNews& news);
  void Show(const EvaluationNews& news);

 private:
  void Erase();

  const Verbosity verbosity_;
  const int64_t steps_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point start_;
  bool drawn_ = false;  // a bar stands on the current line
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_DISPLAY_H_
