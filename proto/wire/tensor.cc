#include "proto/wire/tensor.h"

#include <algorithm>
#include <cstring>

namespace lossd::wire {

void Tensor::CopyTo(std::span<std::byte> target) const {
  std::byte* out = target.data();
  for (const std::span<const std::byte> part : parts) {
    std::memcpy(out, part.data(), part.size());
    out += part.size();
  }
}

void Tensor::CopyTo(std::span<const std::span<std::byte>> targets) const {
  size_t target = 0;
  size_t filled = 0;
  for (std::span<const std::byte> part : parts) {
    while (!part.empty()) {
      while (filled == targets[target].size()) {
        ++target;
        filled = 0;
      }
      const size_t size = std::min(part.size(), targets[target].size() - filled);
      std::memcpy(targets[target].data() + filled, part.data(), size);
      filled += size;
      part = part.subspan(size);
    }
  }
}

}  // namespace lossd::wire
