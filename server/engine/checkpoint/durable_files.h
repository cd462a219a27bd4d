// What checkpoints need of a file system: whole files, folders that appear under their name at once, and
// nothing that a crash could leave half done unnoticed.
//
// Every path is relative to one folder, and no symbolic link below it is followed. Errors name the path and
// what the system says: RESOURCE_EXHAUSTED where there is no room, FAILED_PRECONDITION where
// nothing may be written, NOT_FOUND, INTERNAL otherwise.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_DURABLE_FILES_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_DURABLE_FILES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/common/file_descriptor.h"

namespace lossd::engine {

// Tells one file from another that has taken its name since.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t number = 0;
  int64_t bytes = 0;
  int64_t modified_ns = 0;

  bool operator==(const FileIdentity&) const = default;
};

// Bytes on the disk of the files below a folder, each counted once however many names it has.
struct FolderBytes {
  int64_t all = 0;
  int64_t alone = 0;  // of files that have no name anywhere else: what removing the folder gives back
};

// Bytes of a file system, as far as this process may use it.
struct DiskSpace {
  int64_t total = 0;
  int64_t free = 0;
};

// Thread-safe: it has no state but the folder. Move-only. A file system that cannot sync folders is no error.
class DurableFiles {
 public:
  // For tests: called before every step that changes the disk, with what it is ("create", "write", "sync",
  // "link", "lock", "make", "rename", "remove"); a number other than 0 is the error that the step fails with.
  using Fault = std::function<int(absl::string_view step, const std::string& path)>;

  // Makes the folder, mode 0700, if it is not there, and locks it until this object is destroyed.
  // FAILED_PRECONDITION if it cannot be made, written to or synced, or another process has it.
  static absl::StatusOr<DurableFiles> Open(const std::string& folder, Fault fault = nullptr);
  // One line for the log for locks, and one for the syncing of folders, if the file system lacks them.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // A folder that is there already is no error.
  absl::Status MakeFolder(const std::string& path) const;
  // A new file for writing, which must not be there.
  absl::StatusOr<FileDescriptor> Create(const std::string& path) const;
  absl::Status Write(const FileDescriptor& file, const std::string& path,
                     std::span<const std::byte> bytes) const;
  absl::Status Sync(const FileDescriptor& file, const std::string& path) const;
  absl::Status SyncFolder(const std::string& path) const;
  // Gives the file at `of` another name, `path`. NOT_FOUND if there is no file at `of`, or one of another
  // identity.
  absl::Status Link(const std::string& of, const FileIdentity& identity, const std::string& path) const;
  absl::StatusOr<FileIdentity> Identify(const FileDescriptor& file, const std::string& path) const;

  // Renames `from` to `to` in the same folder; the file that had the name is removed. At every moment there
  // is a file under that name, or both are under `from` and LeftOver(to). Once the rename is durable there is
  // no error, even if the old file could not be removed from `from` or LeftOver(to).
  absl::Status Replace(const std::string& from, const std::string& to) const;
  static std::string LeftOver(const std::string& path);

  // A regular file for reading.
  absl::StatusOr<FileDescriptor> OpenFile(const std::string& path) const;
  // The content of a regular file of at most `most` bytes.
  absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t most) const;
  static absl::Status Read(const FileDescriptor& file, const std::string& path, int64_t offset,
                           std::span<std::byte> out);
  // A whole small file: durable when it returns, and never seen in part.
  absl::Status WriteFile(const std::string& path, absl::string_view content) const;

  absl::Status Rename(const std::string& from, const std::string& to) const;
  // Removes a folder with its files, or a file. It is no error if there is none.
  absl::Status Remove(const std::string& path) const;
  // The names of a folder's entries, sorted, without "." and "..".
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) const;
  absl::StatusOr<bool> Exists(const std::string& path) const;

  // What lies in a folder, or in all of them if `path` is empty. What goes away meanwhile is left out.
  absl::StatusOr<FolderBytes> Measure(const std::string& path) const;
  // Space on the file system that the folder is on.
  absl::StatusOr<DiskSpace> Space() const;

 private:
  struct Inode {
    uint64_t names = 0;  // that it has
    uint64_t seen = 0;   // of these
    int64_t bytes = 0;
  };
  using Inodes = std::map<std::pair<uint64_t, uint64_t>, Inode>;  // by device and number
  absl::Status AddInodes(const std::string& path, Inodes* inodes) const;

  DurableFiles(std::string root, FileDescriptor held, Fault fault)
      : root_(std::move(root)), held_(std::move(held)), fault_(std::move(fault)) {}

  // The folder that holds `path`, and its name there.
  struct Place {
    FileDescriptor folder;
    std::string name;
  };
  absl::StatusOr<Place> Find(const std::string& path) const;
  absl::StatusOr<FileDescriptor> OpenFolder(const std::string& path) const;
  // Returns 0, EWOULDBLOCK if another process has the folder, or the error of a warning that it adds. Without
  // `lock_` the error is that of opening it.
  int Lock();
  // 0 or an error.
  int SyncError(const FileDescriptor& file, const std::string& path) const;
  absl::Status SyncFolder(const FileDescriptor& folder, const std::string& path) const;
  // Ok unless a test says otherwise.
  absl::Status Begin(absl::string_view step, const std::string& path) const;

  std::string root_;
  FileDescriptor held_;  // the folder
  FileDescriptor lock_;  // a file in it
  std::vector<std::string> warnings_;
  Fault fault_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_DURABLE_FILES_H_
