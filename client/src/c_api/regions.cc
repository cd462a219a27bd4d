// Memory that is shared with a server on the same host.
#include <array>

#include "client/src/c_api/arguments.h"
#include "client/src/c_api/handles.h"
#include "client/src/c_api/output.h"

using namespace lossd::c_api;  // NOLINT(google-build-using-namespace): all of this file is about it

lossd_status* lossd_client_create_region(lossd_client* client, int32_t kind, int64_t bytes,
                                         lossd_region** region) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(region, "region"); !status.ok()) return status;
    static constexpr std::array kKinds = {lossd::RegionKind::kSystem, lossd::RegionKind::kDevice};
    const auto known = EnumOf(kKinds, kind, "kind");
    if (!known.ok()) return known.status();
    return PutHandle(client->client->CreateRegion(*known, bytes), region);
  });
}

void* lossd_region_data(const lossd_region* region) {
  return region == nullptr ? nullptr : region->region.data();
}

int64_t lossd_region_size(const lossd_region* region) {
  return region == nullptr ? 0 : region->region.size();
}

lossd_status* lossd_region_copy_in(const lossd_region* region, int64_t offset, const void* host,
                                   int64_t bytes) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(region, "region"); !status.ok()) return status;
    if (absl::Status status = NotNull(host, "host"); !status.ok()) return status;
    return region->region.CopyIn(offset, host, bytes);
  });
}

lossd_status* lossd_region_copy_out(const lossd_region* region, int64_t offset, void* host, int64_t bytes) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(region, "region"); !status.ok()) return status;
    if (absl::Status status = NotNull(host, "host"); !status.ok()) return status;
    return region->region.CopyOut(offset, host, bytes);
  });
}

void lossd_region_free(lossd_region* region) { delete region; }
