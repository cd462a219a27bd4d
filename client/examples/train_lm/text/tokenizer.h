// The tokenizer: SentencePiece in BPE mode, trained on the training paragraphs alone and then applied to all.
//
// It runs in a process of its own, train_lm_tokenizer, which is expected beside this program. The
// distribution's SentencePiece carries a private copy of protobuf and exports its symbols; in one process
// with gRPC's protobuf, each would call into the other.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TOKENIZER_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TOKENIZER_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/examples/train_lm/text/split.h"

namespace lossd::train_lm {

struct TokenizedText {
  int64_t vocabulary = 0;
  int32_t begin_id = 0;          // <s>
  int32_t end_id = 0;            // </s>
  std::vector<Tokens> training;  // one for each paragraph, without <s> and </s>
  std::vector<Tokens> held_out;
};

// Paragraphs hold no line breaks. INVALID_ARGUMENT if no tokenizer of that size can be made from them.
// Deterministic.
absl::StatusOr<TokenizedText> Tokenize(std::span<const std::string_view> training,
                                       std::span<const std::string_view> held_out,
                                       int64_t largest_vocabulary);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_TOKENIZER_H_
