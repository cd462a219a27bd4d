#include "client/examples/train_lm/text/sentence_piece.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace lossd::train_lm {
namespace {

class ParagraphIterator final : public sentencepiece::SentenceIterator {
 public:
  explicit ParagraphIterator(const std::vector<std::string_view>& paragraphs) : paragraphs_(paragraphs) {
    Load();
  }

  bool done() const override { return next_ >= paragraphs_.size(); }
  void Next() override {
    ++next_;
    Load();
  }
  const std::string& value() const override { return value_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  void Load() {
    if (!done()) value_ = paragraphs_[next_];
  }

  const std::vector<std::string_view>& paragraphs_;
  size_t next_ = 0;
  std::string value_;
};

}  // namespace

struct SentencePiece::Impl {
  sentencepiece::SentencePieceProcessor processor;
};

SentencePiece::SentencePiece(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SentencePiece::~SentencePiece() = default;

std::unique_ptr<SentencePiece> SentencePiece::Train(const std::vector<std::string_view>& paragraphs,
                                                    int vocabulary, std::string* error) {
  size_t longest = 0;
  for (const std::string_view paragraph : paragraphs) longest = std::max(longest, paragraph.size());
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(vocabulary)},
      {"hard_vocab_limit", "false"},  // a short text may not have that many pieces
      {"character_coverage", "1.0"},
      {"max_sentence_length", std::to_string(longest + 1)},  // longer ones would be skipped in silence
      {"num_threads", "1"},
      {"minloglevel", "2"},
  };
  ParagraphIterator iterator(paragraphs);
  std::string model;
  sentencepiece::util::Status status = sentencepiece::SentencePieceTrainer::Train(options, &iterator, &model);
  auto impl = std::make_unique<Impl>();
  if (status.ok()) status = impl->processor.LoadFromSerializedProto(model);
  if (!status.ok()) {
    *error = status.ToString();
    return nullptr;
  }
  return std::unique_ptr<SentencePiece>(new SentencePiece(std::move(impl)));
}

std::vector<int32_t> SentencePiece::Encode(std::string_view text) const {
  // Releases differ in the type of string view that they take.
  // NOLINTNEXTLINE(performance-string-view-conversions)
  const std::vector<int> ids = impl_->processor.EncodeAsIds(std::string(text));
  return {ids.begin(), ids.end()};
}

int SentencePiece::vocabulary() const { return impl_->processor.GetPieceSize(); }
int32_t SentencePiece::begin_id() const { return impl_->processor.bos_id(); }
int32_t SentencePiece::end_id() const { return impl_->processor.eos_id(); }

}  // namespace lossd::train_lm
