#include "proto/safetensors/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lossd {
namespace {

constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;  // a FIFO must not hang us

absl::Status ErrnoStatus(const std::string& path, int error_number) {
  return absl::Status(CodeOfFileError(error_number),
                      absl::StrCat("cannot open '", path, "': ", std::strerror(error_number)));
}

// Where an open file is, as the kernel knows it: without links.
absl::StatusOr<std::string> PlaceOf(int file) {
  std::error_code error;
  const std::filesystem::path place =
      std::filesystem::read_symlink(absl::StrCat("/proc/self/fd/", file), error);
  if (error) return absl::InternalError(absl::StrCat("cannot find out where a file is: ", error.message()));
  return place.string();
}

bool IsBelow(const std::string& place, const std::string& root) {
  return place == root || root == "/" || absl::StartsWith(place, absl::StrCat(root, "/"));
}

// A handle that opens nothing yet: what it leads to is looked at first, and cannot be exchanged afterwards.
absl::StatusOr<int> OpenHandleBelow(const std::string& root, const std::string& path) {
  std::error_code error;
  const std::string folder = std::filesystem::canonical(root, error).string();
  if (error) return ErrnoStatus(path, error.value());
  const int handle = open(absl::StrCat(folder, "/", path).c_str(), O_PATH | O_CLOEXEC);
  if (handle < 0) return ErrnoStatus(path, errno);
  const absl::StatusOr<std::string> place = PlaceOf(handle);
  if (place.ok() && IsBelow(*place, folder)) return handle;
  close(handle);
  if (!place.ok()) return place.status();
  return absl::PermissionDeniedError(absl::StrCat("'", path, "' is a link that leads out of its folder"));
}

}  // namespace

absl::StatusCode CodeOfFileError(int error_number) {
  if (error_number == ELOOP) return absl::StatusCode::kInvalidArgument;
  const absl::StatusCode code = absl::ErrnoToStatusCode(error_number);
  switch (code) {
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kUnimplemented:
      return absl::StatusCode::kInvalidArgument;
    default:
      return code;
  }
}

bool StaysInside(const std::string& path) {
  const std::filesystem::path parts(path);
  if (path.empty() || path.find('\0') != std::string::npos || parts.is_absolute()) return false;
  return std::none_of(parts.begin(), parts.end(),
                      [](const std::filesystem::path& part) { return part == ".."; });
}

absl::StatusOr<InputFile> InputFile::Open(const std::string& root, const std::string& path) {
  if (path.find('\0') != std::string::npos || (!root.empty() && !StaysInside(path))) {
    return absl::InvalidArgumentError(absl::StrCat("'", path.substr(0, path.find('\0')),
                                                   "' is not a path below its folder: it must be ",
                                                   "relative, without '..'"));
  }
  int opened = -1;
  if (root.empty()) {
    opened = open(path.c_str(), kReadFlags);
    if (opened < 0) return ErrnoStatus(path, errno);
  } else {
    const absl::StatusOr<int> handle = OpenHandleBelow(root, path);
    if (!handle.ok()) return handle.status();
    opened = *handle;
  }
  InputFile file(path, opened);
  struct stat info {};
  if (fstat(opened, &info) != 0) return ErrnoStatus(path, errno);
  if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is not a regular file"));
  }
  if (!root.empty()) {
    const int readable = open(absl::StrCat("/proc/self/fd/", opened).c_str(), kReadFlags);
    if (readable < 0) return ErrnoStatus(path, errno);
    close(std::exchange(file.file_, readable));
  }
  file.is_directory_ = S_ISDIR(info.st_mode);
  file.size_ = info.st_size;
  return file;
}

InputFile::~InputFile() {
  if (file_ >= 0) close(file_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      is_directory_(other.is_directory_),
      size_(other.size_) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  std::swap(is_directory_, other.is_directory_);
  std::swap(size_, other.size_);
  return *this;
}

absl::Status InputFile::Read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(file_, out.data(), out.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return absl::Status(CodeOfFileError(errno),
                          absl::StrCat("cannot read '", path_, "': ", std::strerror(errno)));
    }
    if (count == 0) {
      return absl::DataLossError(absl::StrCat("'", path_, "' ends at byte ", offset, "; it had ", size_,
                                              " when it was opened: it was shortened since"));
    }
    offset += count;
    out = out.subspan(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

}  // namespace lossd
