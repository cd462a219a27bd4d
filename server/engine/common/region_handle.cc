#include "server/engine/common/region_handle.h"

#include <sys/random.h>

#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

// The system's generator. It gives so few bytes always whole, once it has begun to.
template <typename T>
T RandomValue() {
  T value{};
  if (getrandom(&value, sizeof(value), 0) != static_cast<ssize_t>(sizeof(value))) std::abort();
  return value;
}

}  // namespace

RegionHandle RegionHandle::Random() {
  RegionHandle handle;
  handle.words_ = RandomValue<std::array<uint64_t, 2>>();
  return handle;
}

absl::StatusOr<RegionHandle> RegionHandle::Parse(absl::string_view bytes, absl::string_view field) {
  if (bytes.size() != kBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kUnknownRegion, field,
                     absl::StrCat("the handle of ", field, " has ", bytes.size(), " bytes; it must have the ",
                                  kBytes, " that CreateRegion answered"));
  }
  RegionHandle handle;
  std::memcpy(handle.words_.data(), bytes.data(), kBytes);
  return handle;
}

std::string RegionHandle::bytes() const {
  std::string bytes(kBytes, '\0');
  std::memcpy(bytes.data(), words_.data(), kBytes);
  return bytes;
}

RegionHandle::Hash RegionHandle::Hash::Random() { return {RandomValue<uint64_t>()}; }

size_t RegionHandle::Hash::operator()(const RegionHandle& handle) const {
  // Steps of splitmix64.
  uint64_t word = handle.words_[0] ^ key;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 ^ handle.words_[1];
  return (word ^ (word >> 27)) * 0x94D049BB133111EB;
}

}  // namespace lossd::engine
