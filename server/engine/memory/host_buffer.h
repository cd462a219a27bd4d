// A move-only owner of page-aligned, zero-filled host memory.
#ifndef LOSSD_SERVER_ENGINE_MEMORY_HOST_BUFFER_H_
#define LOSSD_SERVER_ENGINE_MEMORY_HOST_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"

namespace lossd::engine {

// Whether the pages are taken from the system at once (so that a lack of memory shows at creation) or when
// first used.
enum class Commit { kNow, kOnUse };

class HostBuffer {
 public:
  // RESOURCE_EXHAUSTED if the system does not give the memory.
  static absl::StatusOr<HostBuffer> Create(int64_t bytes, Commit commit);

  HostBuffer() = default;
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  ~HostBuffer();

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  std::span<std::byte> span() { return {data_, static_cast<size_t>(size_)}; }

 private:
  HostBuffer(std::byte* data, int64_t size) : data_(data), size_(size) {}

  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MEMORY_HOST_BUFFER_H_
