// From documents to what the trainer needs: a tokenizer made from the training part, the two disjoint parts
// as tokens, and the unigram model that any language model has to beat.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TEXT_DATA_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TEXT_DATA_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/examples/train_lm/text/corpus.h"
#include "client/examples/train_lm/text/split.h"

namespace lossd::train_lm {

// Token sequences one behind the other, each led by padding so that no context reaches into its neighbour.
struct TokenText {
  Tokens tokens;
  std::vector<int64_t> positions;  // of the tokens that are to be predicted: all but the padding
};

TokenText JoinSequences(std::span<const Tokens> sequences, int32_t padding_token, int64_t padding);

struct TextData {
  int64_t vocabulary = 0;
  TokenText training;
  TokenText held_out;
  std::vector<float> unigram;  // [vocabulary] log-probabilities: training frequencies with add-one smoothing

  std::vector<std::string> held_out_chapters;  // "document: title"
  int64_t removed_tokens = 0;                  // of the training part, because they repeat held-out text
  int64_t shared_ngrams_before = 0;            // n-grams of length kSharedNgram, before the removal
  int64_t shared_ngrams = 0;                   // counted again afterwards; always 0
};

struct TextOptions {
  int64_t vocabulary = 8192;  // at most
  int64_t padding = 32;       // tokens that a context may reach back
};

// A paragraph is encoded on its own and ends with </s>, which is predicted like any token. INVALID_ARGUMENT
// if the text is too small to hold anything out.
absl::StatusOr<TextData> PrepareText(std::span<const Document> documents, const TextOptions& options);

// exp of the mean negative log-probability of the positions of `text` under unigram log-probabilities.
double UnigramPerplexity(const TokenText& text, std::span<const float> unigram);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TEXT_DATA_H_
