// Memory of the caller that gRPC reads from on its own threads, and the wait until it no longer does.
#ifndef LOSSD_CLIENT_SRC_BATCH_LENT_MEMORY_H_
#define LOSSD_CLIENT_SRC_BATCH_LENT_MEMORY_H_

#include <grpcpp/support/slice.h>

#include <cstddef>
#include <memory>
#include <span>

namespace lossd::internal {

class LentMemory {
 public:
  LentMemory();
  // Waits until everything is given back. A message that was answered has been given back, or is about to be;
  // one that was not is given back when its stream's connection is gone, so end the stream first.
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  // Refers to `bytes`. Thread-safe, as is dropping the slice.
  grpc::Slice Lend(std::span<const std::byte> bytes) const;

 private:
  struct Count;
  const std::shared_ptr<Count> count_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_BATCH_LENT_MEMORY_H_
