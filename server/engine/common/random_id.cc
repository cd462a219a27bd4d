#include "server/engine/common/random_id.h"

#include <array>
#include <cstdint>
#include <random>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace lossd::engine {

std::string RandomId() {
  std::random_device
      device;  // getrandom() or the processor's generator; never a seeded sequence in libstdc++
  std::array<char, 16> bytes{};
  for (size_t i = 0; i < bytes.size(); i += 4) {
    const uint32_t word = device();
    for (size_t k = 0; k < 4; ++k) bytes[i + k] = static_cast<char>(word >> (8 * k));
  }
  bytes[6] = static_cast<char>((bytes[6] & 0x0f) | 0x40);
  bytes[8] = static_cast<char>((bytes[8] & 0x3f) | 0x80);
  const std::string hex = absl::BytesToHexString({bytes.data(), bytes.size()});
  return absl::StrCat(hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-", hex.substr(16, 4),
                      "-", hex.substr(20));
}

}  // namespace lossd::engine
