// --port_file: tells whoever started the server which ports it took.
#ifndef LOSSD_SERVER_PORT_FILE_H_
#define LOSSD_SERVER_PORT_FILE_H_

#include <string>

#include "absl/status/status.h"

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

// Whole or not at all: a reader never sees half a file. UNAVAILABLE, as CheckPortFile. An empty path: nothing
// is written.
absl::Status WritePortFile(const std::string& path, const Ports& ports);

}  // namespace lossd

#endif  // LOSSD_SERVER_PORT_FILE_H_
