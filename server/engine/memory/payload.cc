#include "server/engine/memory/payload.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace lossd::engine {

const char* Name(MemoryPlace place) {
  switch (place) {
    case MemoryPlace::kHost:
      return "host";
    case MemoryPlace::kRegisteredHost:
      return "pinned";
    case MemoryPlace::kDevice:
      return "device";
    case MemoryPlace::kRank:
      return "rank";
  }
  return "host";
}

Payload::Payload(std::vector<ByteSpan> parts, std::shared_ptr<const void> owner, int64_t kept_bytes)
    : parts_(std::move(parts)), owner_(std::move(owner)), kept_bytes_(kept_bytes) {
  for (const ByteSpan part : parts_) size_ += static_cast<int64_t>(part.size());
}

Payload Payload::Of(std::string bytes) {
  if (bytes.empty()) return {};
  auto owner = std::make_shared<const std::string>(std::move(bytes));
  const ByteSpan part = std::as_bytes(std::span(*owner));
  const auto size = static_cast<int64_t>(part.size());
  return {{part}, std::move(owner), size};
}

Payload Payload::Of(const ResultBytes& bytes) {
  if (bytes.size() == 0) return {};
  const ByteSpan part(bytes.data(), static_cast<size_t>(bytes.size()));
  Payload payload({part}, bytes.owner(), bytes.size());
  payload.place_ = bytes.place();
  return payload;
}

Payload Payload::In(ByteSpan part, MemoryPlace place, std::shared_ptr<const void> owner) {
  Payload payload({part}, std::move(owner), /*kept_bytes=*/0);
  payload.place_ = place;
  return payload;
}

Payload Payload::At(const RankMemory& memory, int64_t bytes, std::shared_ptr<const void> owner) {
  Payload payload({}, std::move(owner), /*kept_bytes=*/0);
  payload.size_ = bytes;
  payload.place_ = MemoryPlace::kRank;
  payload.at_rank_ = memory;
  return payload;
}

Payload Payload::Gathered() const {
  if (size_ == 0) return {};
  ResultBytes bytes(size_);
  Gather(parts_, bytes.data());
  return Of(bytes);
}

ByteSpan PayloadReader::Next(int64_t most) {
  if (parts_.empty()) return {};
  const ByteSpan rest = parts_.front().subspan(offset_);
  const size_t count = std::min(rest.size(), static_cast<size_t>(most));
  offset_ += count;
  if (count == rest.size()) {
    parts_ = parts_.subspan(1);
    offset_ = 0;
  }
  return rest.first(count);
}

void Gather(std::span<const ByteSpan> parts, std::byte* out) {
  for (const ByteSpan part : parts) {
    std::memcpy(out, part.data(), part.size());
    out += part.size();
  }
}

}  // namespace lossd::engine
