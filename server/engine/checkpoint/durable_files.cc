#include "server/engine/checkpoint/durable_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr mode_t kFolderMode = 0700;
constexpr mode_t kFileMode = 0600;
constexpr char kTemporaryEnd[] = ".new";
constexpr char kLockFile[] = ".lock";
constexpr int64_t kBlock = 512;  // bytes that stat counts blocks in, whatever the file system's are

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EROFS:
    case EACCES:
    case EPERM:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

absl::Status Failed(absl::string_view what, const std::string& path, int error) {
  std::string advice;
  if (error == ENOSPC || error == EDQUOT) advice = " (make room in --checkpoint_dir, or remove checkpoints)";
  if (CodeOf(error) == absl::StatusCode::kFailedPrecondition) {
    advice = " (this server has to be able to write there)";
  }
  return MakeError(
      CodeOf(error), RejectReason::kCheckpoint, "",
      absl::StrCat("cannot ", what, " '", path, "' of --checkpoint_dir: ", strerror(error), advice));
}

// Whether fsync says that the file system cannot sync folders. A folder that it could not sync is another
// error.
bool CannotSyncFolders(int error) {
  constexpr int kNotSupported = 524;  // ENOTSUPP, which some file systems let out of the kernel
  constexpr auto kErrors =
      std::to_array({EINVAL, EBADF, ENOSYS, EOPNOTSUPP, kNotSupported, EISDIR, EACCES, EPERM});
  return std::ranges::find(kErrors, error) != kErrors.end();
}

// Calls again if a signal has interrupted the call, but not for ever. Returns 0 or the error.
template <typename Call>
int ErrorOf(Call call) {
  constexpr int kMostCalls = 100;
  for (int calls = 0; calls < kMostCalls; ++calls) {
    if (call() == 0) return 0;
    if (errno != EINTR) break;
  }
  return errno;
}

absl::StatusOr<FileIdentity> IdentityOf(int file, const std::string& path) {
  struct stat status {};
  if (fstat(file, &status) != 0) return Failed("look at", path, errno);
  return FileIdentity{status.st_dev, status.st_ino, status.st_size,
                      int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

}  // namespace

absl::StatusOr<DurableFiles> DurableFiles::Open(const std::string& folder, Fault fault) {
  const auto refuse = [&folder](absl::string_view what, int error) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kCheckpoint, "checkpoint_dir",
                     absl::StrCat("--checkpoint_dir '", folder, "' ", what, ": ", strerror(error)));
  };
  const bool made = mkdir(folder.c_str(), kFolderMode) == 0;
  if (!made && errno != EEXIST) return refuse("cannot be made", errno);
  FileDescriptor opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.number() < 0) return refuse("cannot be used", errno);
  if (faccessat(opened.number(), ".", R_OK | W_OK | X_OK, AT_EACCESS) != 0) {
    return refuse("cannot be written to", errno);
  }
  DurableFiles files(folder, std::move(opened), std::move(fault));
  const int locked = files.Lock();
  if (locked == EWOULDBLOCK) return refuse("is in use, perhaps by another lossd", locked);
  if (files.lock_.number() < 0) {
    return refuse("has a file .lock that this user cannot open for writing", locked);
  }
  int error = files.SyncError(files.held_, "");
  if (made && (error == 0 || CannotSyncFolders(error))) {
    const FileDescriptor parent(openat(files.held_.number(), "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (parent.number() < 0) return refuse("cannot be kept in its folder", errno);
    if (const int of_parent = files.SyncError(parent, ".."); of_parent != 0) error = of_parent;
  }
  if (error != 0 && !CannotSyncFolders(error)) return refuse("cannot be synced to the disk", error);
  if (error != 0) {
    files.warnings_.push_back(
        absl::StrCat("--checkpoint_dir is on a file system that does not sync folders (", strerror(error),
                     "): checkpoints of the last moments before a power failure may be missing afterwards"));
  }
  return files;
}

int DurableFiles::Lock() {
  // A file system of a network may lock only files, and only for processes that have them open for writing.
  lock_ =
      FileDescriptor(openat(held_.number(), kLockFile, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, kFileMode));
  if (lock_.number() < 0) return errno;
  int error = fault_ ? fault_("lock", kLockFile) : 0;
  if (error == 0) error = ErrorOf([this] { return flock(lock_.number(), LOCK_EX | LOCK_NB); });
  if (error != 0 && error != EWOULDBLOCK) {
    warnings_.push_back(
        absl::StrCat("--checkpoint_dir cannot be locked (", strerror(error),
                     "): see that no other lossd uses this folder, or they remove each other's checkpoints"));
  }
  return error;
}

absl::Status DurableFiles::Begin(absl::string_view step, const std::string& path) const {
  const int error = fault_ ? fault_(step, path) : 0;
  return error == 0 ? absl::OkStatus() : Failed(step, path, error);
}

absl::StatusOr<FileDescriptor> DurableFiles::OpenFolder(const std::string& path) const {
  FileDescriptor folder(open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.number() < 0) return Failed("open", path, errno);
  for (const absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    FileDescriptor next(
        openat(folder.number(), std::string(part).c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (next.number() < 0) return Failed("open", path, errno);
    folder = std::move(next);
  }
  return folder;
}

absl::StatusOr<DurableFiles::Place> DurableFiles::Find(const std::string& path) const {
  const size_t end = path.rfind('/');
  absl::StatusOr<FileDescriptor> folder = OpenFolder(end == std::string::npos ? "" : path.substr(0, end));
  if (!folder.ok()) return folder.status();
  return Place{*std::move(folder), end == std::string::npos ? path : path.substr(end + 1)};
}

absl::Status DurableFiles::MakeFolder(const std::string& path) const {
  absl::StatusOr<Place> place = Find(path);
  if (!place.ok()) return place.status();
  if (absl::Status begun = Begin("make", path); !begun.ok()) return begun;
  if (mkdirat(place->folder.number(), place->name.c_str(), kFolderMode) != 0 && errno != EEXIST) {
    return Failed("make", path, errno);
  }
  // Also of one that is there: whoever made it may not have come so far.
  return SyncFolder(place->folder, path);
}

absl::StatusOr<FileDescriptor> DurableFiles::Create(const std::string& path) const {
  absl::StatusOr<Place> place = Find(path);
  if (!place.ok()) return place.status();
  if (absl::Status begun = Begin("create", path); !begun.ok()) return begun;
  FileDescriptor file(openat(place->folder.number(), place->name.c_str(),
                             O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode));
  if (file.number() < 0) return Failed("create", path, errno);
  return file;
}

absl::Status DurableFiles::Write(const FileDescriptor& file, const std::string& path,
                                 std::span<const std::byte> bytes) const {
  if (absl::Status begun = Begin("write", path); !begun.ok()) return begun;
  while (!bytes.empty()) {
    const ssize_t written = write(file.number(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Failed("write", path, errno);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status DurableFiles::Sync(const FileDescriptor& file, const std::string& path) const {
  const int error = SyncError(file, path);
  return error == 0 ? absl::OkStatus() : Failed("sync", path, error);
}

int DurableFiles::SyncError(const FileDescriptor& file, const std::string& path) const {
  if (const int error = fault_ ? fault_("sync", path) : 0; error != 0) return error;
  return ErrorOf([&file] { return fsync(file.number()); });
}

absl::Status DurableFiles::SyncFolder(const FileDescriptor& folder, const std::string& path) const {
  const int error = SyncError(folder, path);
  return error == 0 || CannotSyncFolders(error) ? absl::OkStatus() : Failed("sync", path, error);
}

absl::Status DurableFiles::SyncFolder(const std::string& path) const {
  absl::StatusOr<FileDescriptor> folder = OpenFolder(path);
  return folder.ok() ? SyncFolder(*folder, path) : folder.status();
}

absl::StatusOr<FileIdentity> DurableFiles::Identify(const FileDescriptor& file,
                                                    const std::string& path) const {
  return IdentityOf(file.number(), path);
}

absl::Status DurableFiles::Link(const std::string& of, const FileIdentity& identity,
                                const std::string& path) const {
  absl::StatusOr<Place> from = Find(of);
  if (!from.ok()) return from.status();
  absl::StatusOr<Place> to = Find(path);
  if (!to.ok()) return to.status();
  if (absl::Status begun = Begin("link", path); !begun.ok()) return begun;
  if (linkat(from->folder.number(), from->name.c_str(), to->folder.number(), to->name.c_str(), 0) != 0) {
    return Failed("link", path, errno);
  }
  absl::StatusOr<FileDescriptor> file = OpenFile(path);
  absl::StatusOr<FileIdentity> linked = file.ok() ? IdentityOf(file->number(), path) : file.status();
  if (linked.ok() && *linked == identity) return absl::OkStatus();
  unlinkat(to->folder.number(), to->name.c_str(), 0);
  return linked.ok() ? Failed("link", path, ENOENT) : linked.status();
}

std::string DurableFiles::LeftOver(const std::string& path) {
  const size_t begin = path.rfind('/') + 1;  // 0 without one
  return absl::StrCat(path.substr(0, begin), ".old-", path.substr(begin));
}

absl::Status DurableFiles::Replace(const std::string& from, const std::string& to) const {
  absl::StatusOr<Place> place = Find(to);
  if (!place.ok()) return place.status();
  const std::string from_name = from.substr(from.rfind('/') + 1);
  const int folder = place->folder.number();
  if (absl::Status begun = Begin("rename", to); !begun.ok()) return begun;
  if (renameat2(folder, from_name.c_str(), folder, place->name.c_str(), RENAME_NOREPLACE) == 0) {
    return SyncFolder(place->folder, to);
  }
  if (errno != EEXIST && errno != EINVAL) return Failed("rename", to, errno);
  if (errno == EEXIST &&
      renameat2(folder, from_name.c_str(), folder, place->name.c_str(), RENAME_EXCHANGE) == 0) {
    if (absl::Status synced = SyncFolder(place->folder, to); !synced.ok()) return synced;
    // What had the name. The new one is there either way, so that it is no error if this fails.
    Remove(from).IgnoreError();
    return absl::OkStatus();
  }
  // A file system that cannot exchange: for a moment neither has the name.
  const std::string old = LeftOver(to);
  if (absl::Status removed = Remove(old); !removed.ok()) return removed;
  const std::string old_name = old.substr(old.rfind('/') + 1);
  if (renameat(folder, place->name.c_str(), folder, old_name.c_str()) != 0 && errno != ENOENT) {
    return Failed("rename", to, errno);
  }
  if (renameat(folder, from_name.c_str(), folder, place->name.c_str()) != 0) {
    const int error = errno;
    renameat(folder, old_name.c_str(), folder, place->name.c_str());
    return Failed("rename", to, error);
  }
  if (absl::Status synced = SyncFolder(place->folder, to); !synced.ok()) return synced;
  Remove(old).IgnoreError();  // as above
  return absl::OkStatus();
}

absl::StatusOr<FileDescriptor> DurableFiles::OpenFile(const std::string& path) const {
  absl::StatusOr<Place> place = Find(path);
  if (!place.ok()) return place.status();
  // Not blocking: it might be a pipe.
  FileDescriptor file(
      openat(place->folder.number(), place->name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (file.number() < 0) return Failed("open", path, errno);
  struct stat status {};
  if (fstat(file.number(), &status) != 0) return Failed("look at", path, errno);
  return S_ISREG(status.st_mode) ? absl::StatusOr<FileDescriptor>(std::move(file))
                                 : Failed("read", path, EINVAL);
}

absl::Status DurableFiles::Read(const FileDescriptor& file, const std::string& path, int64_t offset,
                                std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = pread(file.number(), out.data(), out.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed("read", path, errno);
    if (got == 0) {
      return MakeError(absl::StatusCode::kDataLoss, RejectReason::kCheckpoint, "",
                       absl::StrCat("'", path, "' of --checkpoint_dir ends early"));
    }
    offset += got;
    out = out.subspan(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> DurableFiles::ReadFile(const std::string& path, int64_t most) const {
  const absl::StatusOr<FileDescriptor> file = OpenFile(path);
  if (!file.ok()) return file.status();
  const absl::StatusOr<FileIdentity> identity = IdentityOf(file->number(), path);
  if (!identity.ok()) return identity.status();
  if (identity->bytes > most) return Failed("read", path, EFBIG);
  std::string content(static_cast<size_t>(identity->bytes), '\0');
  absl::Status read = Read(*file, path, 0, std::as_writable_bytes(std::span(content)));
  if (!read.ok()) return read;
  return content;
}

absl::Status DurableFiles::WriteFile(const std::string& path, absl::string_view content) const {
  const std::string temporary = absl::StrCat(path, kTemporaryEnd);
  if (absl::Status removed = Remove(temporary); !removed.ok()) return removed;
  absl::StatusOr<FileDescriptor> file = Create(temporary);
  if (!file.ok()) return file.status();
  absl::Status status = Write(*file, temporary, std::as_bytes(std::span(content)));
  if (status.ok()) status = Sync(*file, temporary);
  if (status.ok()) status = Rename(temporary, path);
  if (!status.ok()) Remove(temporary).IgnoreError();
  return status;
}

absl::Status DurableFiles::Rename(const std::string& from, const std::string& to) const {
  absl::StatusOr<Place> source = Find(from);
  if (!source.ok()) return source.status();
  absl::StatusOr<Place> target = Find(to);
  if (!target.ok()) return target.status();
  if (absl::Status begun = Begin("rename", to); !begun.ok()) return begun;
  if (renameat(source->folder.number(), source->name.c_str(), target->folder.number(),
               target->name.c_str()) != 0) {
    return Failed("rename", to, errno);
  }
  return SyncFolder(target->folder, to);
}

absl::Status DurableFiles::Remove(const std::string& path) const {
  absl::StatusOr<Place> place = Find(path);
  if (!place.ok()) return absl::IsNotFound(place.status()) ? absl::OkStatus() : place.status();
  if (absl::Status begun = Begin("remove", path); !begun.ok()) return begun;
  const int folder = place->folder.number();
  if (unlinkat(folder, place->name.c_str(), 0) == 0 || errno == ENOENT) return absl::OkStatus();
  if (errno != EISDIR && errno != EPERM) return Failed("remove", path, errno);
  absl::StatusOr<std::vector<std::string>> entries = List(path);
  if (!entries.ok()) return entries.status();
  for (const std::string& entry : *entries) {
    if (absl::Status removed = Remove(absl::StrCat(path, "/", entry)); !removed.ok()) return removed;
  }
  if (unlinkat(folder, place->name.c_str(), AT_REMOVEDIR) == 0) return absl::OkStatus();
  return Failed("remove", path, errno);
}

absl::StatusOr<std::vector<std::string>> DurableFiles::List(const std::string& path) const {
  const absl::StatusOr<FileDescriptor> folder = OpenFolder(path);
  if (!folder.ok()) return folder.status();
  struct Close {
    void operator()(DIR* stream) const { closedir(stream); }
  };
  const int copy = dup(folder->number());  // the stream closes it
  const std::unique_ptr<DIR, Close> stream(copy < 0 ? nullptr : fdopendir(copy));
  if (stream == nullptr) return Failed("list", path, errno);
  std::vector<std::string> names;
  while (const dirent* entry = readdir(stream.get())) {
    const std::string name(static_cast<const char*>(entry->d_name));
    if (name != "." && name != "..") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<bool> DurableFiles::Exists(const std::string& path) const {
  absl::StatusOr<Place> place = Find(path);
  if (!place.ok()) return absl::IsNotFound(place.status()) ? absl::StatusOr<bool>(false) : place.status();
  struct stat status {};
  if (fstatat(place->folder.number(), place->name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (errno == ENOENT) return false;
  return Failed("look at", path, errno);
}

absl::Status DurableFiles::AddInodes(const std::string& path, Inodes* inodes) const {
  const absl::StatusOr<FileDescriptor> folder = OpenFolder(path);
  const absl::StatusOr<std::vector<std::string>> names = folder.ok() ? List(path) : folder.status();
  // It was removed meanwhile, or is none of lossd's (the lost+found of a volume, which only root may read).
  if (absl::IsNotFound(names.status()) || absl::IsFailedPrecondition(names.status())) return absl::OkStatus();
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const std::string below = path.empty() ? name : absl::StrCat(path, "/", name);
    struct stat status {};
    if (fstatat(folder->number(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;
      return Failed("look at", below, errno);
    }
    if (S_ISDIR(status.st_mode)) {
      if (absl::Status added = AddInodes(below, inodes); !added.ok()) return added;
    } else {
      Inode& inode = (*inodes)[{status.st_dev, status.st_ino}];
      inode = {.names = status.st_nlink, .seen = inode.seen + 1, .bytes = status.st_blocks * kBlock};
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<FolderBytes> DurableFiles::Measure(const std::string& path) const {
  Inodes inodes;
  if (absl::Status added = AddInodes(path, &inodes); !added.ok()) return added;
  FolderBytes bytes;
  for (const auto& [id, inode] : inodes) {
    bytes.all += inode.bytes;
    if (inode.seen >= inode.names) bytes.alone += inode.bytes;
  }
  return bytes;
}

absl::StatusOr<DiskSpace> DurableFiles::Space() const {
  struct statvfs status {};
  if (fstatvfs(held_.number(), &status) != 0) return Failed("look at", ".", errno);
  const auto bytes = [&status](fsblkcnt_t blocks) {
    return static_cast<int64_t>(blocks) * static_cast<int64_t>(status.f_frsize);
  };
  // The blocks that are reserved for root count neither as used nor as free.
  return DiskSpace{.total = bytes(status.f_blocks - status.f_bfree + status.f_bavail),
                   .free = bytes(status.f_bavail)};
}

}  // namespace lossd::engine
