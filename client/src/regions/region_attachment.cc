#include "client/src/regions/region_attachment.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace lossd::internal {

absl::StatusOr<v1::RegionAttachment> ParseRegionAttachment(std::string_view packet) {
  v1::RegionAttachment attachment;
  if (!attachment.ParseFromArray(packet.data(), static_cast<int>(packet.size()))) {
    return absl::InternalError("the server's answer on its socket is not a lossd.v1.RegionAttachment");
  }
  if (attachment.code() != 0) {
    return absl::Status(static_cast<absl::StatusCode>(attachment.code()), attachment.message());
  }
  if (attachment.bytes() < 1 || attachment.bytes() > kMostRegionBytes) {
    return absl::InternalError(
        absl::StrCat("the server's answer on its socket is a region of ", attachment.bytes(), " bytes"));
  }
  return attachment;
}

}  // namespace lossd::internal
