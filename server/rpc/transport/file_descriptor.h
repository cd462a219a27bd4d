// A move-only owner of a file descriptor.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_FILE_DESCRIPTOR_H_
#define LOSSD_SERVER_RPC_TRANSPORT_FILE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace lossd::rpc {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int file) : file_(file) {}
  FileDescriptor(FileDescriptor&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~FileDescriptor() {
    if (file_ >= 0) close(file_);
  }

  int get() const { return file_; }
  bool valid() const { return file_ >= 0; }
  // The caller's to close from now on.
  int Release() { return std::exchange(file_, -1); }

 private:
  int file_ = -1;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_FILE_DESCRIPTOR_H_
