// A server that shares memory, and a client's side of that on the level of the protocol.
#ifndef LOSSD_TESTS_INTEGRATION_REGIONS_REGION_FIXTURE_H_
#define LOSSD_TESTS_INTEGRATION_REGIONS_REGION_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client/src/regions/region_lease.h"
#include "tests/support/test_server.h"

namespace lossd::testing {

TestServerOptions WithRegions(int64_t total_bytes = 64 << 20, int64_t client_bytes = 64 << 20);

// CreateRegion over gRPC.
struct Created {
  grpc::Status status;
  v1::CreateRegionResponse region;
};
Created CreateRegion(Stubs& stubs, int64_t bytes, v1::RegionKind kind = v1::REGION_KIND_SYSTEM);

// A region with its lease and mapping, without the client library.
class RawRegion {
 public:
  RawRegion(Stubs& stubs, int64_t bytes);
  ~RawRegion();
  RawRegion(const RawRegion&) = delete;
  RawRegion& operator=(const RawRegion&) = delete;

  std::byte* data() const { return data_; }
  int64_t size() const { return created_.bytes(); }
  const std::string& handle() const { return created_.handle(); }
  const internal::RegionLease& lease() const { return *lease_; }
  void EndLease() { lease_.reset(); }
  void Put(int64_t offset, const std::string& bytes) const;
  std::string Get(int64_t offset, int64_t bytes) const;

 private:
  v1::CreateRegionResponse created_;
  std::optional<internal::RegionLease> lease_;
  std::byte* data_ = nullptr;
};

void Set(v1::TensorRef* ref, const std::string& handle, int64_t offset);

// What the server says is reserved for regions.
int64_t ReservedForRegions(Stubs& stubs);
// Regions and bytes in use, of both kinds.
int64_t RegionsInUse(TestServer& server);

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_REGIONS_REGION_FIXTURE_H_
