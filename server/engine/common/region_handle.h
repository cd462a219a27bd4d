// The name of a region: not to be guessed.
#ifndef LOSSD_SERVER_ENGINE_COMMON_REGION_HANDLE_H_
#define LOSSD_SERVER_ENGINE_COMMON_REGION_HANDLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::engine {

// 128 random bits: who has them may use the region.
class RegionHandle {
 public:
  static constexpr size_t kBytes = 16;

  // From the system's generator.
  static RegionHandle Random();
  // INVALID_ARGUMENT naming `field` if these are not as many bytes.
  static absl::StatusOr<RegionHandle> Parse(absl::string_view bytes, absl::string_view field);
  std::string bytes() const;

  // Takes the same time wherever two handles differ.
  bool operator==(const RegionHandle& other) const {
    return ((words_[0] ^ other.words_[0]) | (words_[1] ^ other.words_[1])) == 0;
  }
  // `key` is random: nobody can tell which handles share a bucket.
  struct Hash {
    static Hash Random();
    uint64_t key = 0;
    size_t operator()(const RegionHandle& handle) const;
  };

 private:
  std::array<uint64_t, 2> words_{};
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_REGION_HANDLE_H_
