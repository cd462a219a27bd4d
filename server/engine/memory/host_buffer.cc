#include "server/engine/memory/host_buffer.h"

#include <sys/mman.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {

absl::StatusOr<HostBuffer> HostBuffer::Create(int64_t bytes, Commit commit) {
  if (bytes == 0) return HostBuffer();
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (commit == Commit::kNow) flags |= MAP_POPULATE;
  void* address = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, -1, 0);
  if (address == MAP_FAILED) {
    return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "",
                     absl::StrCat("the system refused ", bytes, " bytes of memory"));
  }
  return HostBuffer(static_cast<std::byte*>(address), bytes);
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

HostBuffer::~HostBuffer() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
}

}  // namespace lossd::engine
