#include "client/examples/train_lm/text_data.h"

#include <cmath>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/examples/train_lm/sentence_piece.h"

namespace lossd::train_lm {
namespace {

Tokens EncodeChapter(const SentencePiece& tokenizer, const Chapter& chapter) {
  Tokens tokens;
  for (const std::string& paragraph : chapter.paragraphs) {
    const Tokens piece = tokenizer.Encode(paragraph);
    tokens.insert(tokens.end(), piece.begin(), piece.end());
    tokens.push_back(tokenizer.end_id());
  }
  return tokens;
}

std::vector<float> UnigramLogProbabilities(const TokenText& text, int64_t vocabulary) {
  std::vector<int64_t> counts(static_cast<size_t>(vocabulary), 1);
  for (const int64_t position : text.positions) {
    ++counts[static_cast<size_t>(text.tokens[static_cast<size_t>(position)])];
  }
  const double total = static_cast<double>(text.positions.size()) + static_cast<double>(vocabulary);
  std::vector<float> log_probabilities;
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
  std::vector<std::string_view> paragraphs;
  for (const Chapter* chapter : parts.training) {
    paragraphs.insert(paragraphs.end(), chapter->paragraphs.begin(), chapter->paragraphs.end());
  }
  std::string error;
  const std::unique_ptr<SentencePiece> tokenizer =
      SentencePiece::Train(paragraphs, static_cast<int>(options.vocabulary), &error);
  if (tokenizer == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no tokenizer of ", options.vocabulary, " pieces can be made from this text: ", error));
  }

  std::vector<Tokens> training;
  for (const Chapter* chapter : parts.training) training.push_back(EncodeChapter(*tokenizer, *chapter));
  std::vector<Tokens> held_out;
  for (const Chapter* chapter : parts.held_out) held_out.push_back(EncodeChapter(*tokenizer, *chapter));
  const DisjointText disjoint = RemoveSharedNgrams(training, held_out, kSharedNgram);
  if (disjoint.segments.empty()) {
    return absl::InvalidArgumentError("nothing is left to train on: the held-out text repeats all of it");
  }

  TextData data;
  data.vocabulary = tokenizer->vocabulary();
  data.training = JoinSequences(disjoint.segments, tokenizer->begin_id(), options.padding);
  data.held_out = JoinSequences(held_out, tokenizer->begin_id(), options.padding);
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
