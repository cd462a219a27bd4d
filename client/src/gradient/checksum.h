// The checksum of a gradient on the wire: XXH3, 64 bits, seed 0.
#ifndef LOSSD_CLIENT_SRC_GRADIENT_CHECKSUM_H_
#define LOSSD_CLIENT_SRC_GRADIENT_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace lossd::internal {

// The checksum of all bytes added, whatever pieces they came in. Not thread-safe.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void Add(std::span<const std::byte> bytes);
  uint64_t Value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_GRADIENT_CHECKSUM_H_
