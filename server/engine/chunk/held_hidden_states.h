// Hidden states that a session's chunks have left, so that later chunks of the same batch need not bring them
// again.
//
// A batch gives way to later ones as a whole, the oldest first, and never to more of itself: clients can tell
// what is left (client/src/session/held_batches.h).
#ifndef LOSSD_SERVER_ENGINE_CHUNK_HELD_HIDDEN_STATES_H_
#define LOSSD_SERVER_ENGINE_CHUNK_HELD_HIDDEN_STATES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/data_type.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/common/mutex.h"

namespace lossd::engine {

// Thread-safe.
class HeldHiddenStates {
 public:
  // `limit_bytes`: of all that is held, and of what chunks that are under way still use.
  explicit HeldHiddenStates(int64_t limit_bytes) : limit_(limit_bytes) {}

  int64_t limit() const { return limit_; }
  // At least what it was.
  void Raise(int64_t limit_bytes) { limit_ = limit_bytes; }
  int64_t used() const { return *used_; }

  // Copies the rows of the chunk's tokens that are not ignored, in place of what its batch had of them. The
  // chunk's content was checked, and its hidden states are in the host's memory. False: there is no room.
  bool Keep(const Chunk& chunk);
  // Gives the chunk the rows that are held of its tokens as hidden states, without a copy; those of ignored
  // ones are 0. Its number of tokens and its labels were checked. NOT_FOUND, saying what is missing, if not
  // all of them are held in its hidden_type.
  absl::Status Recall(int64_t hidden_size, Chunk* chunk);

 private:
  using Rows = std::shared_ptr<std::byte>;
  struct Piece {
    int64_t tokens = 0;
    int64_t row_bytes = 0;
    kernels::DataType type = kernels::DataType::kFloat32;
    Rows rows;

    int64_t bytes() const { return tokens * row_bytes; }
  };
  using Pieces = std::map<int64_t, Piece>;  // by the place of their first token; they do not overlap
  struct Batch {
    uint64_t number = 0;
    int64_t bytes = 0;
    Pieces pieces = {};
  };
  using Batches = std::list<Batch>;  // in the order in which they began
  class Finder;

  // Forgets what is held of these tokens.
  void Drop(uint64_t number, int64_t first, int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);
  // Memory for a piece of that batch, which counts from now on until it is freed. Null: there is no room.
  Rows MakeRoom(uint64_t number, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Add(uint64_t number, int64_t first, Piece piece) ABSL_LOCKS_EXCLUDED(mutex_);
  Batches::iterator FindBatch(uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether another piece of so many bytes may be there.
  bool HasRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::atomic<int64_t> limit_;
  // By memory that may outlive this.
  const std::shared_ptr<std::atomic<int64_t>> used_ = std::make_shared<std::atomic<int64_t>>(0);
  mutable Mutex mutex_;
  Batches batches_ ABSL_GUARDED_BY(mutex_);  // none is empty
  int64_t pieces_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_HELD_HIDDEN_STATES_H_
