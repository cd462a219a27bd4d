// What is trained on and what is held out.
//
// Held out are whole chapters: of each document the one whose size is closest to 1/kBlocks of it (front
// matter never). Manuals quote themselves and each other, so every training token that is part of an n-gram
// which also occurs in the held-out part is removed, and the text is cut there: no n-gram that spans a cut
// exists.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_SPLIT_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_SPLIT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/examples/train_lm/text/corpus.h"

namespace lossd::train_lm {

using Tokens = std::vector<int32_t>;

// No n-gram of this many tokens is shared by the two parts.
inline constexpr int64_t kSharedNgram = 20;

// Index of the chapter to hold out, or -1 if the document has fewer than two eligible chapters.
int64_t HeldOutChapter(const Document& document);

struct DisjointText {
  std::vector<Tokens> segments;  // of the training text, in order, none empty
  int64_t removed_tokens = 0;
};

// The training text without any n-gram of the held-out text. Segments are never joined.
DisjointText RemoveSharedNgrams(std::span<const Tokens> training, std::span<const Tokens> held_out,
                                int64_t n);

// Number of positions in `training` at which an n-gram of `held_out` begins.
int64_t CountSharedNgrams(std::span<const Tokens> training, std::span<const Tokens> held_out, int64_t n);

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TEXT_SPLIT_H_
