// What a server says about a region on its socket (proto/lossd/v1/region.proto).
#ifndef LOSSD_CLIENT_SRC_REGIONS_REGION_ATTACHMENT_H_
#define LOSSD_CLIENT_SRC_REGIONS_REGION_ATTACHMENT_H_

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "lossd/v1/region.pb.h"

namespace lossd::internal {

// A region's memory, in bytes, is above 0 and at most this.
inline constexpr int64_t kMostRegionBytes = int64_t{1} << 50;

// The packet's message if the region is attached; otherwise the server's refusal. INTERNAL if it is no such
// message, or speaks of memory that there cannot be. A pure function.
absl::StatusOr<v1::RegionAttachment> ParseRegionAttachment(std::string_view packet);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_REGIONS_REGION_ATTACHMENT_H_
