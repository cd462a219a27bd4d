#include "server/engine/regions/region_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

class SystemMemory : public RegionMemory {
 public:
  SystemMemory(int file, int64_t bytes) : file_(file), bytes_(bytes) {}
  ~SystemMemory() override {
    if (given_up_) (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes_);
    if (data_ != MAP_FAILED) munmap(data_, static_cast<size_t>(bytes_));
    if (file_ >= 0) close(file_);
  }

  // 0 or an error number.
  int Map() {
    if (file_ < 0 || ftruncate(file_, bytes_) != 0) return errno;
    // With pages, not with promises: a write to a hole could find the system without memory.
    if (const int failure = posix_fallocate(file_, 0, bytes_); failure != 0) return failure;
    if (fcntl(file_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return errno;
    data_ = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                 file_, 0);
    return data_ == MAP_FAILED ? errno : 0;
  }

  void GiveUp() override { given_up_ = true; }

  std::byte* data() const override { return static_cast<std::byte*>(data_); }
  int64_t size() const override { return bytes_; }
  MemoryPlace place() const override { return MemoryPlace::kHost; }
  int file() const override { return file_; }

 private:
  const int file_;
  const int64_t bytes_;
  void* data_ = MAP_FAILED;
  std::atomic<bool> given_up_ = false;
};

}  // namespace

const char* Name(RegionKind kind) { return kind == RegionKind::kSystem ? "system" : "device"; }

int64_t WholePages(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

absl::StatusOr<std::shared_ptr<RegionMemory>> CreateSystemMemory(int64_t bytes) {
  auto memory =
      std::make_shared<SystemMemory>(memfd_create("lossd-region", MFD_CLOEXEC | MFD_ALLOW_SEALING), bytes);
  if (const int failure = memory->Map(); failure != 0) {
    return MakeError(absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, "bytes",
                     absl::StrCat("the system refused a region of ", bytes,
                                  " bytes: ", std::generic_category().message(failure)));
  }
  return memory;
}

}  // namespace lossd::engine
