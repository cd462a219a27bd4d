// What a run came to, and its two forms: a table for people and JSON for scripts.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_RESULTS_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_RESULTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace lossd::train_lm {

struct Evaluation {
  int64_t step = 0;
  double held_out_perplexity = 0;
};

struct Results {
  double unigram_perplexity = 0;
  double held_out_perplexity = 0;
  std::vector<Evaluation> evaluations;
  std::vector<double> losses;  // of every step, nats a token

  int64_t steps = 0;
  int64_t batch = 0;
  int64_t accumulate = 0;
  int64_t tokens = 0;  // trained on, counted once for every time
  double seconds = 0;  // of training and evaluation
  double training_seconds = 0;

  int64_t vocabulary = 0;
  int64_t hidden = 0;
  int64_t parameters = 0;
  int64_t head_parameters = 0;
  int64_t training_text_tokens = 0;
  int64_t held_out_tokens = 0;
  int64_t removed_tokens = 0;
  int64_t shared_ngrams = 0;
  std::vector<std::string> held_out_chapters;
  uint64_t seed = 0;

  std::string holder;             // what held the head: "the server" or "this process"
  std::string server;             // its address; empty if it was this process
  std::string dtype;              // "bf16" or "fp32"
  std::string device;             // as the server reports it
  int64_t server_peak_bytes = 0;  // of the process that held the head

  // To and from the head in training steps alone: neither initial weights nor evaluations.
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t steps_with_traffic =
      0;  // that these are of: those since the run last went on from where it was saved

  int64_t BytesPerStep(int64_t bytes) const {
    return steps_with_traffic > 0 ? bytes / steps_with_traffic : 0;
  }
  // What the weights, or their gradient, would add to that each time they travelled.
  int64_t WeightBytes() const { return vocabulary * hidden * static_cast<int64_t>(sizeof(float)); }
  double TokensPerSecond() const {
    return training_seconds > 0 ? static_cast<double>(tokens) / training_seconds : 0;
  }
  // What one batch's logits and their gradient would take, both [batch, vocabulary] fp32.
  int64_t FullLogitsBytes() const { return batch * vocabulary * 2 * static_cast<int64_t>(sizeof(float)); }
};

std::string SummaryTable(const Results& results);
std::string Mebibytes(int64_t bytes);  // "155.3 MiB"

// The file appears complete or not at all.
absl::Status WriteJson(const Results& results, const std::string& path);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_RESULTS_H_
