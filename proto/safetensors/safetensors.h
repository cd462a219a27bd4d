// Reading and writing safetensors files: a streaming writer for tensors larger than memory, a memory-mapped
// reader that trusts nothing it reads, and sharded models (a directory with model.safetensors.index.json).
//
// Used at both ends: by clients, and by servers that load weights from a folder of theirs. Tensor data is
// row-major, dense and little-endian. Errors are absl::Status and name the file; nothing throws. Distinct
// objects may be used from distinct threads; const methods of one reader from any number of threads.
#ifndef LOSSD_PROTO_SAFETENSORS_SAFETENSORS_H_
#define LOSSD_PROTO_SAFETENSORS_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/safetensors/header.h"
#include "proto/safetensors/input_file.h"

namespace lossd {

// The element types that lossd reads and writes.
enum class SafetensorsType { kFloat32, kBFloat16, kFloat16 };
int64_t SizeOf(SafetensorsType type);    // bytes of one element
const char* Name(SafetensorsType type);  // as the format spells it: "F32", ...

struct SafetensorsTensor {
  std::string name{};
  SafetensorsType dtype = SafetensorsType::kFloat32;
  std::vector<int64_t> shape{};
};

// Writes one file from beginning to end. The bytes go to a temporary file beside it, so that a file under the
// final name is always complete and on disk, and an older file of that name stays whole until then. A path
// that is a link stays one: the file that it leads to is written. An older file's mode is kept, and its owner
// and group as far as the process may set them. Not thread-safe.
//
// A full disk, quota or file-size limit is RESOURCE_EXHAUSTED (a process that runs under a file-size limit
// must ignore SIGXFSZ to see it). After an error every later call returns that error.
class SafetensorsWriter {
 public:
  // The tensors' data follow each other in the order given. Reserves the space where the file system can, so
  // that a full disk shows before anything was transferred. `path` must be new or a regular file.
  static absl::StatusOr<SafetensorsWriter> Create(const std::string& path,
                                                  std::vector<SafetensorsTensor> tensors,
                                                  std::map<std::string, std::string> metadata = {});
  // Without a Finish() that succeeded, removes the temporary file.
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) noexcept;

  // The next bytes of tensor data, cut anywhere. INVALID_ARGUMENT above what the tensors need.
  absl::Status Append(std::span<const std::byte> bytes);
  // FAILED_PRECONDITION if bytes are missing. Otherwise syncs the file, gives it its name and syncs the
  // directory.
  absl::Status Finish();

 private:
  SafetensorsWriter() = default;
  absl::Status Write(std::span<const std::byte> bytes);
  absl::Status Error(int error_number, absl::string_view action);
  absl::Status CreateTemporary();
  void TakeOver(const struct stat& old) const;
  absl::Status Publish();
  void Discard();

  std::string path_;       // as given
  std::string target_;     // the file that it leads to
  std::string temporary_;  // empty: nothing to remove
  int fd_ = -1;
  int64_t file_bytes_ = 0;  // of the complete file
  int64_t data_bytes_ = 0;  // of tensor data in it
  int64_t appended_ = 0;
  absl::Status status_;
};

// A tensor inside a mapped file. `data` may be unaligned for its dtype.
struct SafetensorsView {
  SafetensorsType dtype = SafetensorsType::kFloat32;
  std::vector<int64_t> shape{};
  std::span<const std::byte> data{};
};

// One file, mapped read-only for the life of the object, its header checked against the size of the file.
// Views stay valid when the object is moved. As with every mapping, shortening the file meanwhile kills a
// process that looks at a view; Read does not.
class SafetensorsFile {
 public:
  // NOT_FOUND, PERMISSION_DENIED, or INVALID_ARGUMENT if it is not a complete safetensors file.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  static absl::StatusOr<SafetensorsFile> Open(InputFile file);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;

  // NOT_FOUND lists what tensors there are, some of them if there are many. INVALID_ARGUMENT if its dtype is
  // none of F32, BF16, F16 (files may hold tensors of other dtypes beside it).
  absl::StatusOr<SafetensorsView> Find(absl::string_view name) const;
  // Copies bytes of a view of this file from `offset` on, which are there, without touching the mapping.
  // DATA_LOSS if the file was shortened.
  absl::Status Read(const SafetensorsView& view, int64_t offset, std::span<std::byte> out) const;
  bool Holds(const SafetensorsView& view) const;
  const std::vector<SafetensorsEntry>& entries() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

 private:
  explicit SafetensorsFile(InputFile file) : file_(std::move(file)) {}

  InputFile file_;
  std::span<const std::byte> mapping_;
  std::span<const std::byte> data_;
  SafetensorsHeader header_;
};

// A file, an index (*.index.json) beside its shards, or a directory with model.safetensors.index.json or a
// single model.safetensors. Shards are opened when a tensor of theirs is asked for and stay mapped. Shard
// names that leave the directory are INVALID_ARGUMENT; links inside it are followed, since model caches are
// made of them.
class SafetensorsModel {
 public:
  static absl::StatusOr<SafetensorsModel> Open(const std::string& path);
  // Opens a path relative to `root`. Nothing outside that folder is opened: neither "..", nor a link, nor a
  // shard leads there (InputFile::Open says with which errors).
  static absl::StatusOr<SafetensorsModel> OpenBelow(const std::string& root, const std::string& path);

  // As SafetensorsFile::Find and Read; the view is valid as long as this object. Not thread-safe.
  absl::StatusOr<SafetensorsView> Find(const std::string& name);
  absl::Status Read(const SafetensorsView& view, int64_t offset, std::span<std::byte> out) const;
  bool Contains(const std::string& name) const { return shard_of_.count(name) > 0; }
  // The tensors of this shape and of a dtype that lossd reads, by name. Opens every shard.
  static constexpr int64_t kAnySize = -1;  // in a shape
  absl::StatusOr<std::vector<std::string>> FindByShape(const std::vector<int64_t>& shape);

 private:
  SafetensorsModel(std::string root, std::string path) : root_(std::move(root)), path_(std::move(path)) {}
  absl::Status Read();
  absl::Status ReadIndex(const InputFile& index, const std::string& directory);
  absl::Status Take(InputFile file);
  absl::StatusOr<const SafetensorsFile*> Shard(const std::string& path);

  std::string root_;                             // empty: anywhere
  std::string path_;                             // as given
  std::map<std::string, std::string> shard_of_;  // tensor name to path of its file
  std::map<std::string, SafetensorsFile> files_;
};

}  // namespace lossd

#endif  // LOSSD_PROTO_SAFETENSORS_SAFETENSORS_H_
