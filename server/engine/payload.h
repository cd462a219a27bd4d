// Bytes that arrived, where they lie: in pieces that somebody else owns together.
#ifndef LOSSD_SERVER_ENGINE_PAYLOAD_H_
#define LOSSD_SERVER_ENGINE_PAYLOAD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lossd::engine {

using ByteSpan = std::span<const std::byte>;

// Immutable; copies share the memory. What is empty has no part, and no part is empty.
class Payload {
 public:
  Payload() = default;
  // `owner` keeps the parts' memory, `kept_bytes` of it: at least the parts themselves.
  Payload(std::vector<ByteSpan> parts, std::shared_ptr<const void> owner, int64_t kept_bytes);
  // One part.
  static Payload Of(std::string bytes);

  int64_t size() const { return size_; }
  int64_t kept_bytes() const { return kept_bytes_; }
  std::span<const ByteSpan> parts() const { return parts_; }

  // Bytes [begin, begin + out.size()).
  void Read(int64_t begin, std::span<std::byte> out) const;
  // The same bytes as one part with memory of its own.
  Payload Gathered() const;

 private:
  std::vector<ByteSpan> parts_;
  std::shared_ptr<const void> owner_;
  int64_t size_ = 0;
  int64_t kept_bytes_ = 0;
};

// One part after the other into `out`.
void Gather(std::span<const ByteSpan> parts, std::byte* out);

// Bytes that are about to be written, all of them: nothing clears them before.
class ResultBytes {
 public:
  ResultBytes() = default;
  explicit ResultBytes(int64_t size)
      : data_(std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(size))), size_(size) {}

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  // Leaves this without memory.
  std::unique_ptr<std::byte[]> Release() {
    size_ = 0;
    return std::move(data_);
  }

 private:
  std::unique_ptr<std::byte[]> data_;
  int64_t size_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_PAYLOAD_H_
