#include "client/src/regions/region.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/regions/cuda_driver.h"

namespace lossd {

using internal::CudaDriver;

Region::Impl::Impl(RegionKind kind, internal::RegionLease lease, std::shared_ptr<internal::RegionMap> map)
    : kind_(kind), lease_(std::move(lease)), map_(std::move(map)) {}

absl::StatusOr<std::unique_ptr<Region::Impl>> Region::Impl::Create(internal::Connection& connection,
                                                                   std::shared_ptr<internal::RegionMap> map,
                                                                   RegionKind kind, int64_t bytes) {
  if (kind == RegionKind::kDevice) {  // before the server takes memory for it
    if (auto driver = CudaDriver::Get(); !driver.ok()) return driver.status();
  }
  v1::CreateRegionRequest request;
  request.set_kind(kind == RegionKind::kSystem ? v1::REGION_KIND_SYSTEM : v1::REGION_KIND_DEVICE);
  request.set_bytes(bytes);
  const auto created = connection.Call(&v1::RegionService::Stub::AsyncCreateRegion, request);
  if (!created.ok()) return created.status();
  auto lease = internal::RegionLease::Attach(created->socket_path(), created->handle(),
                                             connection.options().call_timeout,
                                             [&connection] { return internal::Asked(connection.options()); });
  if (!lease.ok()) {
    // Rather than let it take memory until the time to attach it is over.
    v1::DeleteRegionRequest remove;
    remove.set_handle(created->handle());
    (void)connection.Call(&v1::RegionService::Stub::AsyncDeleteRegion, remove, internal::kDeletion);
    return lease.status();
  }
  std::unique_ptr<Impl> region(new Impl(kind, *std::move(lease), std::move(map)));
  if (absl::Status status = region->Map(); !status.ok()) return status;
  region->map_->Add(region->data_, {.bytes = region->size(),
                                    .handle = created->handle(),
                                    .kind = kind,
                                    .alive = [lease = &region->lease_] { return lease->Alive(); }});
  return region;
}

absl::Status Region::Impl::Map() {
  const v1::RegionAttachment& attachment = lease_.attachment();
  if (kind_ == RegionKind::kDevice) {
    const auto driver = CudaDriver::Get();
    if (!driver.ok()) return driver.status();
    auto opened = (*driver)->Open(attachment.device_handle(), attachment.device_bus_id());
    if (!opened.ok()) return opened.status();
    data_ = *opened;
    return absl::OkStatus();
  }
  // With its page tables: no batch has to wait for them.
  void* const mapped = mmap(nullptr, static_cast<size_t>(attachment.bytes()), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_POPULATE, lease_.memory().get(), 0);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot map a region of ", attachment.bytes(),
                                                     " bytes: ", std::generic_category().message(errno)));
  }
  data_ = mapped;
  return absl::OkStatus();
}

Region::Impl::~Impl() {
  if (data_ == nullptr) return;
  map_->Remove(data_);
  if (kind_ == RegionKind::kSystem) {
    munmap(data_, static_cast<size_t>(size()));
  } else if (const auto driver = CudaDriver::Get(); driver.ok()) {
    (*driver)->Close(data_, lease_.attachment().device_bus_id());
  }
}

absl::Status Region::Impl::CheckRange(int64_t offset, int64_t bytes) const {
  if (offset >= 0 && bytes >= 0 && bytes <= size() && offset <= size() - bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(bytes, " bytes from ", offset, " on are not in a region of ", size(), " bytes"));
}

absl::Status Region::Impl::CopyIn(int64_t offset, const void* host, int64_t bytes) const {
  if (absl::Status status = CheckRange(offset, bytes); !status.ok()) return status;
  std::byte* const to = static_cast<std::byte*>(data_) + offset;
  if (kind_ == RegionKind::kSystem) {
    std::memcpy(to, host, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  const auto driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  return (*driver)->CopyToDevice(to, host, bytes, lease_.attachment().device_bus_id());
}

absl::Status Region::Impl::CopyOut(int64_t offset, void* host, int64_t bytes) const {
  if (absl::Status status = CheckRange(offset, bytes); !status.ok()) return status;
  const std::byte* const from = static_cast<const std::byte*>(data_) + offset;
  if (kind_ == RegionKind::kSystem) {
    std::memcpy(host, from, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  const auto driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  return (*driver)->CopyToHost(host, from, bytes, lease_.attachment().device_bus_id());
}

Region::Region(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Region::~Region() = default;
Region::Region(Region&&) noexcept = default;
Region& Region::operator=(Region&&) noexcept = default;

void* Region::data() const { return impl_->data(); }
int64_t Region::size() const { return impl_->size(); }
RegionKind Region::kind() const { return impl_->kind(); }
absl::Status Region::CopyIn(int64_t offset, const void* host, int64_t bytes) const {
  return impl_->CopyIn(offset, host, bytes);
}
absl::Status Region::CopyOut(int64_t offset, void* host, int64_t bytes) const {
  return impl_->CopyOut(offset, host, bytes);
}

}  // namespace lossd
