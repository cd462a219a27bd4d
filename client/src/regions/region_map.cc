#include "client/src/regions/region_map.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::internal {

void RegionMap::Add(const void* data, Entry entry) {
  const std::lock_guard lock(mutex_);
  regions_[static_cast<const std::byte*>(data)] = std::move(entry);
}

void RegionMap::Remove(const void* data) {
  const std::lock_guard lock(mutex_);
  regions_.erase(static_cast<const std::byte*>(data));
}

absl::StatusOr<std::optional<RegionPlace>> RegionMap::Find(const void* data, int64_t bytes,
                                                           const char* name) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  auto it = regions_.upper_bound(begin);
  if (it == regions_.begin()) return std::nullopt;
  --it;
  const Entry& region = it->second;
  const int64_t offset = begin - it->first;
  if (offset >= region.bytes) return std::nullopt;
  if (bytes > region.bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat(name, " begins in a region of ", region.bytes,
                                                   " bytes, at ", offset, ", but has ", bytes, " bytes"));
  }
  if (!region.alive()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the region of ", name,
                     " is gone: the server ended its lease, perhaps because it was restarted; create another "
                     "one (Client::CreateRegion) and fill it"));
  }
  return RegionPlace{.handle = region.handle, .offset = offset, .kind = region.kind};
}

}  // namespace lossd::internal
