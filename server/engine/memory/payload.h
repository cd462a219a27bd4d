// Bytes that arrived, where they lie: in pieces that somebody else owns together. And places that results go
// to.
#ifndef LOSSD_SERVER_ENGINE_MEMORY_PAYLOAD_H_
#define LOSSD_SERVER_ENGINE_MEMORY_PAYLOAD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lossd::engine {

using ByteSpan = std::span<const std::byte>;

enum class MemoryPlace {
  kHost,
  kRegisteredHost,  // known to the device, which copies from and to it by itself
  kDevice,          // an address of the device: the host cannot read it
  kRank,            // of another rank's process: known here by its number there
};
inline constexpr int kMemoryPlaceCount = 3;  // in which a process has memory of its own
const char* Name(MemoryPlace place);         // "host", "pinned", "device", "rank"

// A tensor that another rank of the group holds, as the leader knows it.
struct RankMemory {
  int32_t rank = 0;
  uint64_t number = 0;     // that the rank has given it
  int64_t non_finite = 0;  // values in it that count and are not finite, as the rank has found
};

// Memory for bytes that are about to be written, all of them: nothing clears it before. Copies share it.
class ResultBytes {
 public:
  ResultBytes() = default;
  explicit ResultBytes(int64_t size)
      : data_(std::make_shared_for_overwrite<std::byte[]>(static_cast<size_t>(size))), size_(size) {}
  ResultBytes(std::shared_ptr<std::byte[]> data, int64_t size, MemoryPlace place)
      : data_(std::move(data)), size_(size), place_(place) {}

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  MemoryPlace place() const { return place_; }
  const std::shared_ptr<std::byte[]>& owner() const { return data_; }

 private:
  std::shared_ptr<std::byte[]> data_;
  int64_t size_ = 0;
  MemoryPlace place_ = MemoryPlace::kHost;
};

// Immutable; copies share the memory. An empty payload has no parts, and no part is empty. One that another
// rank holds has none either, whatever its size.
class Payload {
 public:
  Payload() = default;
  // `owner` keeps the parts' memory, `kept_bytes` of it: at least the parts themselves, unless it is there
  // anyway.
  Payload(std::vector<ByteSpan> parts, std::shared_ptr<const void> owner, int64_t kept_bytes);
  // One part.
  static Payload Of(std::string bytes);
  static Payload Of(const ResultBytes& bytes);
  // One part of memory that stays the owner's whatever happens here, such as a region's, and is counted
  // there: others may write to it at any time. Aligned to 16 bytes.
  static Payload In(ByteSpan part, MemoryPlace place, std::shared_ptr<const void> owner);
  // `bytes` that a rank holds, without parts here. `owner`, as long as it lives, has them held there.
  static Payload At(const RankMemory& memory, int64_t bytes, std::shared_ptr<const void> owner);

  int64_t size() const { return size_; }
  int64_t kept_bytes() const { return kept_bytes_; }
  std::span<const ByteSpan> parts() const { return parts_; }
  MemoryPlace place() const { return place_; }
  // Where it is, of MemoryPlace::kRank; for any other place it says rank 0.
  const RankMemory& at_rank() const { return at_rank_; }

  // The same bytes as one part with memory of its own. Not of MemoryPlace::kRank.
  Payload Gathered() const;

 private:
  std::vector<ByteSpan> parts_;
  std::shared_ptr<const void> owner_;
  int64_t size_ = 0;
  int64_t kept_bytes_ = 0;
  MemoryPlace place_ = MemoryPlace::kHost;
  RankMemory at_rank_;
};

// Where results are to be written instead of memory made for them.
struct OutputRange {
  std::byte* data = nullptr;               // aligned to 16 bytes; null of MemoryPlace::kRank
  MemoryPlace place = MemoryPlace::kHost;  // kRank: they stay with the hidden states
  std::shared_ptr<const void> owner;

  // Whether it is a place at all.
  bool is_set() const { return data != nullptr || place == MemoryPlace::kRank; }
};

// Goes through a payload from its beginning, part by part.
class PayloadReader {
 public:
  explicit PayloadReader(const Payload& payload) : parts_(payload.parts()) {}

  // The next bytes, as many as lie together but no more than `most`; empty at the end.
  ByteSpan Next(int64_t most);

 private:
  std::span<const ByteSpan> parts_;
  size_t offset_ = 0;  // in the first of them
};

// One part after the other into `out`.
void Gather(std::span<const ByteSpan> parts, std::byte* out);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MEMORY_PAYLOAD_H_
