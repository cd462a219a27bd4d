// Gives out pieces of a range of memory that somebody else has: first fit, in whole units; what is given back
// joins its free neighbours. Knows offsets only.
//
// Not thread-safe.
#ifndef LOSSD_SERVER_ENGINE_MEMORY_ARENA_H_
#define LOSSD_SERVER_ENGINE_MEMORY_ARENA_H_

#include <cstdint>
#include <map>
#include <optional>

namespace lossd::engine {

struct PoolUsage {
  int64_t capacity = 0;
  int64_t used = 0;
  int64_t peak = 0;  // most that was used at once
};

class Arena {
 public:
  static constexpr int64_t kUnit = 4096;  // bytes; every piece begins at a multiple of it

  explicit Arena(int64_t bytes);

  // The offset of a piece of at least `bytes` >= 1; nothing if no free range has as many.
  std::optional<int64_t> Take(int64_t bytes);
  // `offset` and `bytes` as they were taken.
  void Give(int64_t offset, int64_t bytes);

  int64_t free_bytes() const { return free_bytes_; }
  PoolUsage usage() const { return {capacity_, capacity_ - free_bytes_, peak_}; }

 private:
  std::map<int64_t, int64_t> free_;  // bytes by offset; no two of them touch
  int64_t free_bytes_ = 0;
  int64_t capacity_ = 0;
  int64_t peak_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MEMORY_ARENA_H_
