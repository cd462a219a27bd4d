#include "client/src/gradient/checksum.h"

// Compiled in: programs that link the installed library need no xxhash of their own.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lossd::internal {

struct Checksum::State {
  XXH3_state_t xxh;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }
Checksum::~Checksum() = default;

void Checksum::Add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}

uint64_t Checksum::Value() const { return XXH3_64bits_digest(&state_->xxh); }

}  // namespace lossd::internal
