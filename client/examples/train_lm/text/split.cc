#include "client/examples/train_lm/text/split.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <unordered_set>

namespace lossd::train_lm {
namespace {

// The bytes of n tokens; the tokens must outlive it.
std::string_view Ngram(const Tokens& tokens, int64_t first, int64_t n) {
  return {reinterpret_cast<const char*>(tokens.data() + first), static_cast<size_t>(n) * sizeof(int32_t)};
}

int64_t NgramCount(const Tokens& tokens, int64_t n) {
  return std::max<int64_t>(0, static_cast<int64_t>(tokens.size()) - n + 1);
}

std::unordered_set<std::string_view> Ngrams(std::span<const Tokens> texts, int64_t n) {
  std::unordered_set<std::string_view> ngrams;
  for (const Tokens& tokens : texts) {
    for (int64_t i = 0; i < NgramCount(tokens, n); ++i) ngrams.insert(Ngram(tokens, i, n));
  }
  return ngrams;
}

}  // namespace

int64_t HeldOutChapter(const Document& document) {
  const int64_t wanted = document.Bytes() / kBlocks;
  int64_t best = -1;
  int64_t best_distance = 0;
  int64_t eligible = 0;
  for (size_t i = 0; i < document.chapters.size(); ++i) {
    const Chapter& chapter = document.chapters[i];
    if (chapter.kind == ChapterKind::kFrontMatter) continue;
    ++eligible;
    const int64_t distance = std::abs(chapter.Bytes() - wanted);
    if (best < 0 || distance < best_distance) {
      best = static_cast<int64_t>(i);
      best_distance = distance;
    }
  }
  return eligible >= 2 ? best : -1;
}

DisjointText RemoveSharedNgrams(std::span<const Tokens> training, std::span<const Tokens> held_out,
                                int64_t n) {
  const std::unordered_set<std::string_view> ngrams = Ngrams(held_out, n);
  DisjointText result;
  for (const Tokens& tokens : training) {
    const auto size = static_cast<int64_t>(tokens.size());
    Tokens segment;
    int64_t shared_until = 0;  // tokens before this position belong to a shared n-gram
    for (int64_t i = 0; i < size; ++i) {
      if (i + n <= size && ngrams.contains(Ngram(tokens, i, n))) shared_until = i + n;
      if (i >= shared_until) {
        segment.push_back(tokens[static_cast<size_t>(i)]);
        continue;
      }
      ++result.removed_tokens;
      if (!segment.empty()) result.segments.push_back(std::move(segment));
      segment.clear();
    }
    if (!segment.empty()) result.segments.push_back(std::move(segment));
  }
  return result;
}

int64_t CountSharedNgrams(std::span<const Tokens> training, std::span<const Tokens> held_out, int64_t n) {
  const std::unordered_set<std::string_view> ngrams = Ngrams(held_out, n);
  int64_t shared = 0;
  for (const Tokens& tokens : training) {
    for (int64_t i = 0; i < NgramCount(tokens, n); ++i) {
      shared += ngrams.contains(Ngram(tokens, i, n)) ? 1 : 0;
    }
  }
  return shared;
}

}  // namespace lossd::train_lm
