#include "tests/integration/regions/region_fixture.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace lossd::testing {

TestServerOptions WithRegions(int64_t total_bytes, int64_t client_bytes) {
  TestServerOptions options;
  options.engine.memory_limit_bytes = 256 << 20;
  options.engine.regions.total_bytes = total_bytes;
  options.engine.regions.client_bytes = client_bytes;
  return options;
}

Created CreateRegion(Stubs& stubs, int64_t bytes, v1::RegionKind kind) {
  v1::CreateRegionRequest request;
  request.set_kind(kind);
  request.set_bytes(bytes);
  Created created;
  grpc::ClientContext context;
  created.status = stubs.regions->CreateRegion(&context, request, &created.region);
  return created;
}

RawRegion::RawRegion(Stubs& stubs, int64_t bytes) {
  Created created = CreateRegion(stubs, bytes);
  EXPECT_TRUE(created.status.ok()) << created.status.error_message();
  created_ = std::move(created.region);
  auto lease = internal::RegionLease::Attach(created_.socket_path(), handle(), std::chrono::seconds(60));
  EXPECT_TRUE(lease.ok()) << lease.status();
  if (!lease.ok()) std::abort();
  lease_ = *std::move(lease);
  data_ = static_cast<std::byte*>(mmap(nullptr, static_cast<size_t>(size()), PROT_READ | PROT_WRITE,
                                       MAP_SHARED, lease_->memory().get(), 0));
  if (data_ == MAP_FAILED) std::abort();
}

RawRegion::~RawRegion() { munmap(data_, static_cast<size_t>(size())); }

void RawRegion::Put(int64_t offset, const std::string& bytes) const {
  std::memcpy(data_ + offset, bytes.data(), bytes.size());
}

std::string RawRegion::Get(int64_t offset, int64_t bytes) const {
  return {reinterpret_cast<const char*>(data_ + offset), static_cast<size_t>(bytes)};
}

void Set(v1::TensorRef* ref, const std::string& handle, int64_t offset) {
  ref->set_handle(handle);
  ref->set_offset(offset);
}

int64_t ReservedForRegions(Stubs& stubs) {
  v1::GetMemoryResponse memory;
  grpc::ClientContext context;
  EXPECT_TRUE(stubs.status->GetMemory(&context, {}, &memory).ok());
  for (const v1::MemoryItem& item : memory.shared()) {
    if (item.purpose() == "regions") return item.bytes();
  }
  return -1;
}

int64_t RegionsInUse(TestServer& server) {
  return server.engine().regions().usage(engine::RegionKind::kSystem).regions +
         server.engine().regions().usage(engine::RegionKind::kDevice).regions;
}

}  // namespace lossd::testing
