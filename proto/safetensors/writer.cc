#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/safetensors/safetensors.h"

namespace lossd {
namespace {

bool IsOutOfSpace(int error_number) {
  return error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG;
}

// Whether fsync's error says that the file system cannot sync folders. DurableFiles has the same table.
bool CannotSyncFolders(int error_number) {
  constexpr int kNotSupported = 524;  // ENOTSUPP, which some file systems let out of the kernel
  constexpr int kErrors[] = {EINVAL, EBADF, ENOSYS, EOPNOTSUPP, kNotSupported, EISDIR, EACCES, EPERM};
  return std::ranges::find(kErrors, error_number) != std::end(kErrors);
}

// What to do about a file that cannot be made; empty if its error says all there is.
const char* AdviceOn(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      return "; create its directory first, or name a file elsewhere";
    case EACCES:
    case EPERM:
    case EROFS:
      return "; name a file in a directory that this user may write to";
    default:
      return "";
  }
}

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// The file that a path leads to, through links, whether it is there or not.
absl::StatusOr<std::string> FollowLinks(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the kernel
  std::string target = path;
  for (int links = 0; links < kMostLinks; ++links) {
    std::error_code error;
    const std::filesystem::path next = std::filesystem::read_symlink(target, error);
    if (error) return target;
    struct statfs info {};
    if (statfs(FolderOf(target).c_str(), &info) == 0 && info.f_type == PROC_SUPER_MAGIC) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", path, "' is a file that this process has open; name a new file or one to replace"));
    }
    target = std::filesystem::path(FolderOf(target)) / next;  // an absolute one replaces the folder
  }
  return absl::InvalidArgumentError(absl::StrCat("'", path, "': ", std::strerror(ELOOP)));
}

absl::StatusOr<SafetensorsHeader> MakeHeader(std::vector<SafetensorsTensor> tensors,
                                             std::map<std::string, std::string> metadata) {
  SafetensorsHeader header{.tensors = {}, .metadata = std::move(metadata)};
  int64_t offset = 0;
  for (SafetensorsTensor& tensor : tensors) {
    auto bytes = SafetensorsBytes(Name(tensor.dtype), tensor.shape);
    int64_t end = 0;
    if (!bytes.ok() || __builtin_add_overflow(offset, *bytes, &end)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", tensor.name, "': ", bytes.ok() ? "too large" : bytes.status().message()));
    }
    header.tensors.push_back({.name = std::move(tensor.name),
                              .dtype = Name(tensor.dtype),
                              .shape = std::move(tensor.shape),
                              .begin = offset,
                              .end = end});
    offset = end;
  }
  return header;
}

}  // namespace

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(const std::string& path,
                                                            std::vector<SafetensorsTensor> tensors,
                                                            std::map<std::string, std::string> metadata) {
  auto header = MakeHeader(std::move(tensors), std::move(metadata));
  if (!header.ok()) return header.status();
  auto json = SerializeSafetensorsHeader(*header);
  if (!json.ok()) return json.status();

  SafetensorsWriter writer;
  writer.path_ = path;
  writer.data_bytes_ = header->tensors.empty() ? 0 : header->tensors.back().end;
  const int64_t prefix_bytes = static_cast<int64_t>(sizeof(uint64_t) + json->size());
  if (__builtin_add_overflow(prefix_bytes, writer.data_bytes_, &writer.file_bytes_)) {
    return absl::InvalidArgumentError("the tensors are too large for one file");
  }
  if (absl::Status status = writer.CreateTemporary(); !status.ok()) return status;

  uint64_t json_bytes = json->size();  // little-endian, as every machine lossd runs on
  if (absl::Status status = writer.Write(std::as_bytes(std::span(&json_bytes, 1))); !status.ok()) {
    return status;
  }
  if (absl::Status status = writer.Write(std::as_bytes(std::span(*json))); !status.ok()) return status;
  return writer;
}

absl::Status SafetensorsWriter::CreateTemporary() {
  if (path_.empty()) return absl::InvalidArgumentError("the file to write has no name; name one");
  struct stat info {};
  const bool replaces = stat(path_.c_str(), &info) == 0;
  if (replaces && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path_, "' is ", S_ISDIR(info.st_mode) ? "a directory" : "not a regular file",
                     "; name a new file or one to replace"));
  }
  absl::StatusOr<std::string> target = FollowLinks(path_);
  if (!target.ok()) return target.status();
  target_ = *std::move(target);
  std::random_device random;
  for (int attempt = 0; attempt < 100 && fd_ < 0; ++attempt) {
    temporary_ = absl::StrCat(target_, ".", absl::Hex(random(), absl::kZeroPad8), ".tmp");
    fd_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && errno != EEXIST) break;
  }
  if (fd_ < 0) {
    temporary_.clear();
    return Error(errno, "create");
  }
  if (replaces) TakeOver(info);
  // Only a reservation: a file system that cannot do it reports a full disk when it is written to.
  if (file_bytes_ > 0 && fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, file_bytes_) != 0 && IsOutOfSpace(errno)) {
    return Error(errno, "reserve space for");
  }
  return absl::OkStatus();
}

void SafetensorsWriter::TakeOver(const struct stat& old) const {
  // A process without CAP_CHOWN cannot set the owner. It can set a group that it belongs to.
  if (fchown(fd_, old.st_uid, old.st_gid) != 0) (void)!fchown(fd_, static_cast<uid_t>(-1), old.st_gid);
  (void)!fchmod(fd_, old.st_mode & 07777);  // after fchown, which takes bits away
}

SafetensorsWriter::~SafetensorsWriter() { Discard(); }

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept { *this = std::move(other); }

SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&& other) noexcept {
  if (this != &other) {
    Discard();
    path_ = std::move(other.path_);
    target_ = std::move(other.target_);
    temporary_ = std::exchange(other.temporary_, {});
    fd_ = std::exchange(other.fd_, -1);
    file_bytes_ = other.file_bytes_;
    data_bytes_ = other.data_bytes_;
    appended_ = other.appended_;
    status_ = std::move(other.status_);
  }
  return *this;
}

absl::Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  if (!status_.ok()) return status_;
  if (static_cast<int64_t>(bytes.size()) > data_bytes_ - appended_) {
    status_ =
        absl::InvalidArgumentError(absl::StrCat("'", path_, "': ", bytes.size(), " bytes appended after ",
                                                appended_, "; the tensors need ", data_bytes_));
    return status_;
  }
  appended_ += static_cast<int64_t>(bytes.size());
  return Write(bytes);
}

absl::Status SafetensorsWriter::Finish() {
  if (!status_.ok()) return status_;
  if (appended_ != data_bytes_) {
    status_ = absl::FailedPreconditionError(
        absl::StrCat("'", path_, "': ", appended_, " bytes appended; the tensors need ", data_bytes_));
    return status_;
  }
  absl::Status result = Publish();
  // Finished or failed for good: nothing more may be written.
  status_ =
      result.ok() ? absl::FailedPreconditionError(absl::StrCat("'", path_, "' is already finished")) : result;
  return result;
}

absl::Status SafetensorsWriter::Publish() {
  struct stat info {};
  if (fstat(fd_, &info) != 0) return Error(errno, "inspect");
  if (info.st_size != file_bytes_) {
    return absl::DataLossError(absl::StrCat("'", path_, "' has ", info.st_size, " bytes after writing ",
                                            file_bytes_, "; something else wrote to '", temporary_, "'"));
  }
  if (fsync(fd_) != 0) return Error(errno, "sync");
  if (close(std::exchange(fd_, -1)) != 0) return Error(errno, "close");
  if (rename(temporary_.c_str(), target_.c_str()) != 0) return Error(errno, "rename");
  temporary_.clear();

  const int folder = open(FolderOf(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) {
    // Writable but not readable: the name cannot be synced, the data is.
    return errno == EACCES ? absl::OkStatus() : Error(errno, "open the directory of");
  }
  const int error_number = fsync(folder) == 0 || CannotSyncFolders(errno) ? 0 : errno;
  close(folder);
  return error_number == 0 ? absl::OkStatus() : Error(error_number, "sync the directory of");
}

absl::Status SafetensorsWriter::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    ssize_t written = write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return Error(written == 0 ? ENOSPC : errno, "write");
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Error(int error_number, absl::string_view action) {
  std::string message = absl::StrCat("cannot ", action, " '", path_, "': ", std::strerror(error_number));
  if (IsOutOfSpace(error_number)) {
    status_ =
        absl::ResourceExhaustedError(absl::StrCat(message, "; the file needs ", file_bytes_,
                                                  " bytes: free space, raise the quota or file-size limit, "
                                                  "or write it elsewhere"));
  } else {
    status_ = absl::Status(CodeOfFileError(error_number), absl::StrCat(message, AdviceOn(error_number)));
  }
  return status_;
}

void SafetensorsWriter::Discard() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
  if (!temporary_.empty()) unlink(std::exchange(temporary_, {}).c_str());
}

}  // namespace lossd
