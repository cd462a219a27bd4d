// Which batches of a session the server holds the hidden states of, as far as can be known here.
#ifndef LOSSD_CLIENT_SRC_SESSION_HELD_BATCHES_H_
#define LOSSD_CLIENT_SRC_SESSION_HELD_BATCHES_H_

#include <cstdint>
#include <deque>
#include <string>

#include "lossd/client.h"

namespace lossd::internal {

// Follows what the server does (server/engine/chunk/held_hidden_states.h): batches give way to later ones,
// the oldest first, and go when they are taken. Where the two differ, a chunk is sent twice. Not thread-safe.
class HeldBatches {
 public:
  // The server has said that it holds so many tokens of the batch, perhaps all that are not ignored. `limit`:
  // bytes of all that it holds for this session.
  void Note(const std::string& session, const HeadConfig& head, const Batch& batch, int64_t tokens,
            int64_t limit);
  // Whether it holds all of the batch, with these labels and this type.
  bool HasAll(const std::string& session, const Batch& batch) const;
  // Its chunks are sent, with hidden states or to take them.
  void Forget(uint64_t number);
  // What all tokens of the batch that are not ignored count there.
  static int64_t BytesOf(const HeadConfig& head, const Batch& batch);

 private:
  struct Entry {
    uint64_t number = 0;
    int64_t bytes = 0;
    bool all = false;
    uint64_t digest = 0;  // of what must be the same when it is taken
  };

  std::string session_;  // that the entries are of
  std::deque<Entry> entries_;
  int64_t bytes_ = 0;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_HELD_BATCHES_H_
