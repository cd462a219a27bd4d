// The connection to the server's socket for regions: it brings a region's memory, and as long as it lives the
// server keeps it (proto/lossd/v1/region.proto).
#ifndef LOSSD_CLIENT_SRC_REGIONS_REGION_LEASE_H_
#define LOSSD_CLIENT_SRC_REGIONS_REGION_LEASE_H_

#include <chrono>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/src/connection/waiting.h"
#include "lossd/v1/region.pb.h"

namespace lossd::internal {

// A move-only owner of a file descriptor.
class File {
 public:
  File() = default;
  explicit File(int file) : file_(file) {}
  File(File&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~File();
  int get() const { return file_; }

 private:
  int file_ = -1;
};

class RegionLease {
 public:
  // The server's refusal; FAILED_PRECONDITION if its socket cannot be reached from here, UNAVAILABLE if it
  // does not answer in time; what `question`, which is asked meanwhile, says if that is not OK.
  static absl::StatusOr<RegionLease> Attach(const std::string& socket_path, const std::string& handle,
                                            std::chrono::milliseconds timeout, const Question& question = {});

  const v1::RegionAttachment& attachment() const { return attachment_; }
  const File& memory() const { return memory_; }  // of system memory
  // False once the server has ended it. Any thread.
  bool Alive() const;

 private:
  File socket_;
  File memory_;
  v1::RegionAttachment attachment_;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_REGIONS_REGION_LEASE_H_
