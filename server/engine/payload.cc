#include "server/engine/payload.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace lossd::engine {

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

void Payload::Read(int64_t begin, std::span<std::byte> out) const {
  auto skip = static_cast<size_t>(begin);
  for (const ByteSpan part : parts_) {
    if (out.empty()) return;
    if (skip >= part.size()) {
      skip -= part.size();
      continue;
    }
    const size_t count = std::min(out.size(), part.size() - skip);
    std::memcpy(out.data(), part.data() + skip, count);
    out = out.subspan(count);
    skip = 0;
  }
}

Payload Payload::Gathered() const {
  if (size_ == 0) return {};
  ResultBytes bytes(size_);
  Gather(parts_, bytes.data());
  const ByteSpan part(bytes.data(), static_cast<size_t>(size_));
  return {{part}, std::shared_ptr<const std::byte[]>(bytes.Release()), size_};
}

void Gather(std::span<const ByteSpan> parts, std::byte* out) {
  for (const ByteSpan part : parts) {
    std::memcpy(out, part.data(), part.size());
    out += part.size();
  }
}

}  // namespace lossd::engine
