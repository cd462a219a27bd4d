// The inside of lossd::Region: the lease, the mapping and the entry in the client's map.
#ifndef LOSSD_CLIENT_SRC_REGIONS_REGION_H_
#define LOSSD_CLIENT_SRC_REGIONS_REGION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection/connection.h"
#include "client/src/regions/region_lease.h"
#include "client/src/regions/region_map.h"
#include "lossd/client.h"

namespace lossd {

class Region::Impl {
 public:
  static absl::StatusOr<std::unique_ptr<Impl>> Create(internal::Connection& connection,
                                                      std::shared_ptr<internal::RegionMap> map,
                                                      RegionKind kind, int64_t bytes);
  // Unmaps the memory and ends the lease.
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void* data() const { return data_; }
  int64_t size() const { return lease_.attachment().bytes(); }
  RegionKind kind() const { return kind_; }
  absl::Status CopyIn(int64_t offset, const void* host, int64_t bytes) const;
  absl::Status CopyOut(int64_t offset, void* host, int64_t bytes) const;

 private:
  Impl(RegionKind kind, internal::RegionLease lease, std::shared_ptr<internal::RegionMap> map);
  absl::Status Map();
  absl::Status CheckRange(int64_t offset, int64_t bytes) const;

  const RegionKind kind_;
  const internal::RegionLease lease_;
  const std::shared_ptr<internal::RegionMap> map_;
  void* data_ = nullptr;
};

}  // namespace lossd

#endif  // LOSSD_CLIENT_SRC_REGIONS_REGION_H_
