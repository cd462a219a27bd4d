#include "client/examples/train_lm/results.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::train_lm {
namespace {

// 1234567 as "1,234,567".
std::string Grouped(int64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped.push_back(',');
    grouped.push_back(digits[i]);
  }
  return grouped;
}

std::string Row(const std::string& name, const std::string& value) {
  return absl::StrFormat("  %-22s %s\n", name, value);
}

}  // namespace

std::string Mebibytes(int64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

std::string SummaryTable(const Results& r) {
  const int64_t trunk_parameters = r.parameters - r.head_parameters;
  std::string table = "\nSummary\n";
  table += Row("text",
               absl::StrFormat("%s tokens to train on, %s held out, %d shared 20-grams",
                               Grouped(r.training_text_tokens), Grouped(r.held_out_tokens), r.shared_ngrams));
  table += Row("model", absl::StrFormat("%s parameters in the head [%d, %d] %s, %s in the trunk",
                                        Grouped(r.head_parameters), r.vocabulary, r.hidden, r.dtype,
                                        Grouped(trunk_parameters)));
  table += Row("head", absl::StrCat(r.holder, r.server.empty() ? "" : " ", r.server, ": ", r.device));
  table += Row("trained", absl::StrFormat("%d steps, %s tokens, %.0f s, %.0f tokens/s", r.steps,
                                          Grouped(r.tokens), r.seconds, r.TokensPerSecond()));
  table += Row("peak memory", absl::StrFormat("%s, all of %s", Mebibytes(r.server_peak_bytes), r.holder));
  if (!r.server.empty()) {
    table += Row("traffic of a step",
                 absl::StrFormat("%s sent, %s received (the weights in fp32, which stay there: %s)",
                                 Mebibytes(r.BytesPerStep(r.bytes_sent)),
                                 Mebibytes(r.BytesPerStep(r.bytes_received)), Mebibytes(r.WeightBytes())));
  }
  table += Row("full logits", absl::StrFormat("%s for one batch with their gradient (never held)",
                                              Mebibytes(r.FullLogitsBytes())));
  table += Row("unigram perplexity", absl::StrFormat("%8.1f on the held-out text", r.unigram_perplexity));
  table += Row("model's perplexity",
               absl::StrFormat("%8.1f on the held-out text: %.1f times lower", r.held_out_perplexity,
                               r.unigram_perplexity / r.held_out_perplexity));
  return table;
}

absl::Status WriteJson(const Results& r, const std::string& path) {
  nlohmann::ordered_json evaluations = nlohmann::ordered_json::array();
  for (const Evaluation& e : r.evaluations) {
    evaluations.push_back({{"step", e.step}, {"held_out_perplexity", e.held_out_perplexity}});
  }
  const nlohmann::ordered_json json = {
      {"held_out_perplexity", r.held_out_perplexity},
      {"unigram_perplexity", r.unigram_perplexity},
      {"tokens", r.tokens},
      {"seconds", r.seconds},
      {"device", r.device},
      {"server_peak_bytes", r.server_peak_bytes},
      {"step_bytes_sent", r.BytesPerStep(r.bytes_sent)},
      {"step_bytes_received", r.BytesPerStep(r.bytes_received)},
      {"weight_bytes", r.WeightBytes()},
      {"full_logits_bytes", r.FullLogitsBytes()},
      {"tokens_per_second", r.TokensPerSecond()},
      {"steps", r.steps},
      {"batch", r.batch},
      {"accumulate", r.accumulate},
      {"seed", r.seed},
      {"server", r.server},
      {"dtype", r.dtype},
      {"vocabulary", r.vocabulary},
      {"hidden", r.hidden},
      {"parameters", r.parameters},
      {"head_parameters", r.head_parameters},
      {"training_text_tokens", r.training_text_tokens},
      {"held_out_tokens", r.held_out_tokens},
      {"held_out_chapters", r.held_out_chapters},
      {"removed_tokens", r.removed_tokens},
      {"shared_ngrams", r.shared_ngrams},
      {"evaluations", evaluations},
      {"losses", r.losses},
  };
  const std::string partial = path + ".partial";
  std::ofstream file(partial, std::ios::trunc);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", partial));
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (error) return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", error.message()));
  return absl::OkStatus();
}

}  // namespace lossd::train_lm
