#include "client/src/session/held_batches.h"

// Compiled in: programs that link the installed library need no xxhash of their own.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace lossd::internal {
namespace {

// What a token counts at the server at least.
constexpr int64_t kLeastBytes = 64;

int64_t BytesOfToken(const HeadConfig& head, const Batch& batch) {
  return std::max(head.hidden_size * SizeOf(batch.hidden_type), kLeastBytes);
}

uint64_t DigestOf(const Batch& batch) {
  const uint64_t labels = XXH3_64bits(batch.labels.data(), batch.labels.size_bytes());
  const uint64_t rest[] = {labels, static_cast<uint64_t>(batch.ignore_index),
                           static_cast<uint64_t>(batch.hidden_type)};
  return XXH3_64bits(rest, sizeof(rest));
}

}  // namespace

int64_t HeldBatches::BytesOf(const HeadConfig& head, const Batch& batch) {
  return CountValid(batch.labels, batch.ignore_index) * BytesOfToken(head, batch);
}

void HeldBatches::Note(const std::string& session, const HeadConfig& head, const Batch& batch, int64_t tokens,
                       int64_t limit) {
  if (session != session_) {
    session_ = session;
    entries_.clear();
    bytes_ = 0;
  }
  Forget(batch.hold);
  if (tokens == 0) return;
  const int64_t bytes = tokens * BytesOfToken(head, batch);
  const bool all = tokens == CountValid(batch.labels, batch.ignore_index);
  entries_.push_back({batch.hold, bytes, all, DigestOf(batch)});
  bytes_ += bytes;
  while (bytes_ > limit && entries_.size() > 1) {
    bytes_ -= entries_.front().bytes;
    entries_.pop_front();
  }
}

bool HeldBatches::HasAll(const std::string& session, const Batch& batch) const {
  return session == session_ && std::any_of(entries_.begin(), entries_.end(), [&batch](const Entry& entry) {
           return entry.number == batch.hold && entry.all && entry.digest == DigestOf(batch);
         });
}

void HeldBatches::Forget(uint64_t number) {
  std::erase_if(entries_, [&](const Entry& entry) {
    if (entry.number != number) return false;
    bytes_ -= entry.bytes;
    return true;
  });
}

}  // namespace lossd::internal
