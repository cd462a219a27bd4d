// Which batches of a session the server holds the hidden states of, as far as can be known here.
#ifndef LOSSD_CLIENT_SRC_SESSION_HELD_BATCHES_H_
#define LOSSD_CLIENT_SRC_SESSION_HELD_BATCHES_H_

#include <cstdint>
#include <deque>
#include <string>

namespace lossd::internal {

// Follows what the server does (server/engine/chunk/held_hidden_states.h): batches give way to later ones,
// the oldest first. Where the two differ, a chunk is sent twice. Not thread-safe.
class HeldBatches {
 public:
  // The server has said that it holds so many bytes of the batch, and whether that is `all` of it. `limit`:
  // of all that it holds for this session.
  void Note(const std::string& session, uint64_t number, int64_t bytes, bool all, int64_t limit);
  bool HasAll(const std::string& session, uint64_t number) const;

 private:
  struct Batch {
    uint64_t number = 0;
    int64_t bytes = 0;
    bool all = false;
  };

  std::string session_;  // that the batches are of
  std::deque<Batch> batches_;
  int64_t bytes_ = 0;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_SESSION_HELD_BATCHES_H_
