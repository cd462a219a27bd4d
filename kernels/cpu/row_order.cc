#include "kernels/cpu/row_order.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace lossd::kernels::cpu {
namespace {

// Locks one row's list; held for a few insertions.
class RowLock {
 public:
  explicit RowLock(int32_t& lock) : lock_(lock) {
    while (lock_.exchange(1, std::memory_order_acquire) != 0) lock_.wait(1, std::memory_order_relaxed);
  }
  ~RowLock() {
    lock_.store(0, std::memory_order_release);
    lock_.notify_one();
  }
  RowLock(const RowLock&) = delete;
  RowLock& operator=(const RowLock&) = delete;

 private:
  const std::atomic_ref<int32_t> lock_;
};

}  // namespace

int32_t WantedTop(const RowReturns& returns) {
  return std::max(returns.top_k, returns.prediction != nullptr ? 1 : 0);
}

void CopyTop(const Workspace& tile, int64_t r, int64_t first, int32_t kept, TopEntry* to) {
  const int32_t listed = std::min(kept, tile.row_details[r].listed);
  for (int32_t i = 0; i < listed; ++i) {
    const int64_t at = r * kMostTopK + i;
    to[i] = {tile.top_logits[at], static_cast<int32_t>(first) + tile.top_tokens[at]};
  }
  std::fill(to + listed, to + kept, TopEntry{});
}

void MergeTop(const TopEntry* more, int32_t kept, TopEntry* top) {
  const auto is_before = [](const TopEntry& a, const TopEntry& b) {
    if (a.token < 0 || b.token < 0) return a.token >= 0;
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  };
  for (int32_t i = 0; i < kept && more[i].token >= 0 && is_before(more[i], top[kept - 1]); ++i) {
    int32_t at = kept - 1;
    for (; at > 0 && is_before(more[i], top[at - 1]); --at) top[at] = top[at - 1];
    top[at] = more[i];
  }
}

RowOrder::RowOrder(const RowReturns& returns, const Workspace& tile)
    : tile_(tile), wants_rank_(returns.target_rank != nullptr), kept_(WantedTop(returns)) {}

void RowOrder::Add(int64_t r, int64_t first, const float* logits, int64_t columns, float largest) const {
  if (wants_rank_) CountAbove(r, first, logits, columns);
  if (kept_ == 0) return;
  // `least` only rises, so a block that fails against an old value fails against the newest too.
  const float least = std::atomic_ref(tile_.row_details[r].least).load(std::memory_order_relaxed);
  if (!(largest < least)) List(r, first, logits, columns);
}

void RowOrder::CountAbove(int64_t r, int64_t first, const float* logits, int64_t columns) const {
  RowDetail& row = tile_.row_details[r];
  int32_t above = 0;
  for (int64_t i = 0; i < columns; ++i) above += logits[i] > row.label_logit ? 1 : 0;
  const int64_t label = tile_.row_states[r].label - first;
  if (label >= 0 && label < columns && logits[label] > row.label_logit) --above;
  if (above > 0) std::atomic_ref(row.above).fetch_add(above, std::memory_order_relaxed);
}

void RowOrder::List(int64_t r, int64_t first, const float* logits, int64_t columns) const {
  RowDetail& row = tile_.row_details[r];
  const float least = std::atomic_ref(row.least).load(std::memory_order_relaxed);
  std::array<int32_t, kLibraryBlock> candidates;
  int64_t count = 0;
  for (int64_t i = 0; i < columns; ++i) {
    candidates[count] = static_cast<int32_t>(i);
    count += logits[i] >= least ? 1 : 0;
  }
  if (count == 0) return;
  const RowLock lock(row.lock);
  for (int64_t i = 0; i < count; ++i) {
    Insert(r, logits[candidates[i]], static_cast<int32_t>(first) + candidates[i]);
  }
  if (row.listed < kept_) return;
  std::atomic_ref(row.least).store(tile_.top_logits[r * kMostTopK + kept_ - 1], std::memory_order_relaxed);
}

void RowOrder::Insert(int64_t r, float logit, int32_t token) const {
  RowDetail& row = tile_.row_details[r];
  float* logits = tile_.top_logits + r * kMostTopK;
  int32_t* tokens = tile_.top_tokens + r * kMostTopK;
  const auto is_before = [&](int32_t at) {
    return logit > logits[at] || (logit == logits[at] && token < tokens[at]);
  };
  int32_t at = row.listed;
  if (at < kept_) {
    ++row.listed;
  } else if (!is_before(--at)) {
    return;
  }
  for (; at > 0 && is_before(at - 1); --at) {
    logits[at] = logits[at - 1];
    tokens[at] = tokens[at - 1];
  }
  logits[at] = logit;
  tokens[at] = token;
}

}  // namespace lossd::kernels::cpu
