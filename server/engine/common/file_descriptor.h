// The owner of an open file.
#ifndef LOSSD_SERVER_ENGINE_COMMON_FILE_DESCRIPTOR_H_
#define LOSSD_SERVER_ENGINE_COMMON_FILE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace lossd::engine {

// An open file; closed with its owner. Move-only.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      if (number_ >= 0) close(number_);
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  ~FileDescriptor() {
    if (number_ >= 0) close(number_);
  }

  int number() const { return number_; }

 private:
  int number_ = -1;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_FILE_DESCRIPTOR_H_
