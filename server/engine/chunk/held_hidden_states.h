// Hidden states that a session's chunks have left, so that the second phase of their batch need not bring
// them again.
//
// What was taken goes. A batch gives way to later ones as a whole, the oldest first, and never to more of
// itself: clients can tell what is left (client/src/session/held_batches.h).
#ifndef LOSSD_SERVER_ENGINE_CHUNK_HELD_HIDDEN_STATES_H_
#define LOSSD_SERVER_ENGINE_CHUNK_HELD_HIDDEN_STATES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/data_type.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/common/mutex.h"

namespace lossd::engine {

// What a token counts at least: less would be more to remember than to hold. Clients know it.
inline constexpr int64_t kLeastHeldBytes = 64;

// Thread-safe.
class HeldHiddenStates {
 public:
  // The rows of the tokens of a chunk that are not ignored.
  struct Piece {
    uint64_t number = 0;  // of the batch
    int64_t first = 0;    // place of the first token among its tokens
    kernels::DataType type = kernels::DataType::kFloat32;
    int64_t row_bytes = 0;
    std::vector<int64_t> labels;
    std::shared_ptr<std::byte> rows;  // their memory counts as long as it is there
    int64_t left = 0;                 // tokens that were not taken

    int64_t tokens() const { return static_cast<int64_t>(labels.size()); }
    int64_t end() const { return first + tokens(); }
  };

  // `limit_bytes`: of all that is held, and of what chunks that are under way still use.
  explicit HeldHiddenStates(int64_t limit_bytes) : limit_(limit_bytes) {}

  int64_t limit() const { return limit_; }
  // At least what it was.
  void Raise(int64_t limit_bytes) { limit_ = limit_bytes; }
  int64_t used() const { return *used_; }

  // A copy of the chunk's rows, for which others have made room. The chunk's content was checked, its hidden
  // states are in the host's memory. None: there is no room, and nothing has gone.
  std::optional<Piece> Copy(const Chunk& chunk);
  // It is held, in place of what its batch had of these tokens.
  void Add(Piece piece);
  // Gives the chunk the rows that are held of its tokens as hidden states, without a copy; those of ignored
  // ones are 0. Its number of tokens and the size of its labels were checked. NOT_FOUND, saying what is
  // missing, if not all of them are held in its hidden_type and with its labels: then nothing was taken.
  absl::Status Take(int64_t hidden_size, Chunk* chunk);

 private:
  using Rows = std::shared_ptr<std::byte>;
  using Pieces = std::map<int64_t, Piece>;  // by their first token
  struct Batch {
    uint64_t number = 0;
    Pieces pieces = {};
  };
  using Batches = std::list<Batch>;  // in the order in which they began
  class Finder;

  // Memory that counts from now on until it is freed. Null: there is no room.
  Rows MakeRoom(uint64_t number, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // What would be free if all batches but this one went.
  int64_t FreeWithout(uint64_t number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Batches::iterator FindBatch(uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t MostPieces() const;
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
