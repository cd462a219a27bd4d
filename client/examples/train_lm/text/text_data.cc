#include "client/examples/train_lm/text/text_data.h"

#include <cmath>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/examples/train_lm/text/tokenizer.h"

namespace lossd::train_lm {
namespace {

std::vector<std::string_view> Paragraphs(std::span<const Chapter* const> chapters) {
  std::vector<std::string_view> paragraphs;
  for (const Chapter* chapter : chapters) {
    paragraphs.insert(paragraphs.end(), chapter->paragraphs.begin(), chapter->paragraphs.end());
  }
  return paragraphs;
}

// One sequence for each chapter; `paragraphs` are those of all chapters.
std::vector<Tokens> ByChapter(std::span<const Chapter* const> chapters, std::span<const Tokens> paragraphs,
                              int32_t end_id) {
  std::vector<Tokens> sequences;
  auto next = paragraphs.begin();
  for (const Chapter* chapter : chapters) {
    Tokens& sequence = sequences.emplace_back();
    for (size_t i = 0; i < chapter->paragraphs.size(); ++i, ++next) {
      sequence.insert(sequence.end(), next->begin(), next->end());
      sequence.push_back(end_id);
    }
  }
  return sequences;
}

std::vector<float> UnigramLogProbabilities(const TokenText& text, int64_t vocabulary) {
  std::vector<int64_t> counts(static_cast<size_t>(vocabulary), 1);
  for (const int64_t position : text.positions) {
    ++counts[static_cast<size_t>(text.tokens[static_cast<size_t>(position)])];
  }
  const double total = static_cast<double>(text.positions.size()) + static_cast<double>(vocabulary);
  std::vector<float> log_probabilities;
  log_probabilities.reserve(counts.size());
  for (const int64_t count : counts) {
    log_probabilities.push_back(static_cast<float>(std::log(static_cast<double>(count) / total)));
  }
  return log_probabilities;
}

struct Parts {
  std::vector<const Chapter*> training;
  std::vector<const Chapter*> held_out;
  std::vector<std::string> held_out_names;
};

Parts Split(std::span<const Document> documents) {
  Parts parts;
  for (const Document& document : documents) {
    const int64_t held_out = HeldOutChapter(document);
    for (size_t i = 0; i < document.chapters.size(); ++i) {
      const Chapter& chapter = document.chapters[i];
      if (static_cast<int64_t>(i) == held_out) {
        parts.held_out.push_back(&chapter);
        parts.held_out_names.push_back(absl::StrCat(document.name, ": ", chapter.title));
      } else {
        parts.training.push_back(&chapter);
      }
    }
  }
  return parts;
}

}  // namespace

TokenText JoinSequences(std::span<const Tokens> sequences, int32_t padding_token, int64_t padding) {
  TokenText text;
  for (const Tokens& sequence : sequences) {
    text.tokens.insert(text.tokens.end(), static_cast<size_t>(padding), padding_token);
    for (const int32_t token : sequence) {
      text.positions.push_back(static_cast<int64_t>(text.tokens.size()));
      text.tokens.push_back(token);
    }
  }
  return text;
}

absl::StatusOr<TextData> PrepareText(std::span<const Document> documents, const TextOptions& options) {
  const Parts parts = Split(documents);
  if (parts.held_out.empty()) {
    return absl::InvalidArgumentError("the text is too short: nothing of it can be held out");
  }
  const absl::StatusOr<TokenizedText> text =
      Tokenize(Paragraphs(parts.training), Paragraphs(parts.held_out), options.vocabulary);
  if (!text.ok()) return text.status();
  const std::vector<Tokens> training = ByChapter(parts.training, text->training, text->end_id);
  const std::vector<Tokens> held_out = ByChapter(parts.held_out, text->held_out, text->end_id);
  const DisjointText disjoint = RemoveSharedNgrams(training, held_out, kSharedNgram);
  if (disjoint.segments.empty()) {
    return absl::InvalidArgumentError("nothing is left to train on: the held-out text repeats all of it");
  }

  TextData data;
  data.vocabulary = text->vocabulary;
  data.training = JoinSequences(disjoint.segments, text->begin_id, options.padding);
  data.held_out = JoinSequences(held_out, text->begin_id, options.padding);
  data.unigram = UnigramLogProbabilities(data.training, data.vocabulary);
  data.held_out_chapters = parts.held_out_names;
  data.removed_tokens = disjoint.removed_tokens;
  data.shared_ngrams_before = CountSharedNgrams(training, held_out, kSharedNgram);
  data.shared_ngrams = CountSharedNgrams(disjoint.segments, held_out, kSharedNgram);
  return data;
}

double UnigramPerplexity(const TokenText& text, std::span<const float> unigram) {
  double sum = 0;
  for (const int64_t position : text.positions) {
    sum -= static_cast<double>(unigram[static_cast<size_t>(text.tokens[static_cast<size_t>(position)])]);
  }
  return std::exp(sum / static_cast<double>(text.positions.size()));
}

}  // namespace lossd::train_lm
