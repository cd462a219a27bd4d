// --port_file: tells whoever started the server which ports it took.
#ifndef LOSSD_SERVER_STARTUP_PORT_FILE_H_
#define LOSSD_SERVER_STARTUP_PORT_FILE_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lossd {

// 0: there is none.
struct Ports {
  int grpc = 0;
  int metrics = 0;
  int health = 0;
};

// Whether a file can be put at `path`, as far as that shows without writing it: UNAVAILABLE if its folder is
// not writable, or if something else than a regular file is there, which the rename would replace. For a
// start to call before it does what a start that fails must not do. An empty path is that of no file.
absl::Status CheckPortFile(const std::string& path);

// Whole or not at all: a reader never sees half a file. In two steps, so that a start finds out that there is
// no room while nobody has been served. Of an empty path neither does anything. Move-only.
class PortFile {
 public:
  // Beside `path`, under a name of its own. UNAVAILABLE, as CheckPortFile, and when the disk is full.
  static absl::StatusOr<PortFile> Write(const std::string& path, const Ports& ports);
  // Without Publish(), nothing is left.
  ~PortFile();
  PortFile(PortFile&& other) noexcept;
  PortFile& operator=(PortFile&&) = delete;

  // Gives it its name. UNAVAILABLE, as CheckPortFile.
  absl::Status Publish();

 private:
  PortFile(std::string path, std::string written) : path_(std::move(path)), written_(std::move(written)) {}

  std::string path_;
  std::string written_;  // empty: there is nothing to be published
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_PORT_FILE_H_
