// SentencePiece in BPE mode, behind the standard library only: SentencePiece's headers declare an
// absl::string_view of their own, so no file that includes them may include Abseil. Everybody else uses
// tokenizer.h.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_SENTENCE_PIECE_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_SENTENCE_PIECE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lossd::train_lm {

class SentencePiece {
 public:
  // Null on failure, with the reason in *error. Deterministic.
  static std::unique_ptr<SentencePiece> Train(const std::vector<std::string_view>& paragraphs, int vocabulary,
                                              std::string* error);
  ~SentencePiece();

  std::vector<int32_t> Encode(std::string_view text) const;
  int vocabulary() const;
  int32_t begin_id() const;  // <s>
  int32_t end_id() const;    // </s>

 private:
  struct Impl;
  explicit SentencePiece(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_SENTENCE_PIECE_H_
