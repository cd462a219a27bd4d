// A file of a model, opened for reading: wherever it is, or only below one folder.
#ifndef LOSSD_PROTO_SAFETENSORS_INPUT_FILE_H_
#define LOSSD_PROTO_SAFETENSORS_INPUT_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lossd {

// The code for an error of a file. INVALID_ARGUMENT in place of codes that speak of a server's state, for
// which callers wait or give advice: a path through a file, links in a circle.
absl::StatusCode CodeOfFileError(int error_number);

// True for a relative path that, read as text, stays below the folder it starts from.
bool StaysInside(const std::string& path);

// A regular file or a folder. Move-only; const methods from any number of threads.
class InputFile {
 public:
  // With a `root`, `path` is relative to it, and what is opened lies below it: neither ".." nor a link leads
  // out. INVALID_ARGUMENT for a path that leaves it and for devices and pipes, which are not even opened;
  // PERMISSION_DENIED for a link out of it; otherwise what the system says, e.g. NOT_FOUND. Messages name
  // `path` alone.
  static absl::StatusOr<InputFile> Open(const std::string& root, const std::string& path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;

  const std::string& path() const { return path_; }
  bool is_directory() const { return is_directory_; }
  int64_t size() const { return size_; }  // when it was opened
  int descriptor() const { return file_; }

  // Fills `out`. DATA_LOSS if the file ends before it: it was shortened since.
  absl::Status Read(int64_t offset, std::span<std::byte> out) const;

 private:
  InputFile(std::string path, int file) : path_(std::move(path)), file_(file) {}

  std::string path_;
  int file_ = -1;
  bool is_directory_ = false;
  int64_t size_ = 0;
};

}  // namespace lossd

#endif  // LOSSD_PROTO_SAFETENSORS_INPUT_FILE_H_
