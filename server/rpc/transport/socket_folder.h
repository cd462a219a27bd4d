// Folders for Unix sockets that no flag names.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_SOCKET_FOLDER_H_
#define LOSSD_SERVER_RPC_TRANSPORT_SOCKET_FOLDER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::rpc {

// Makes a folder PREFIX-XXXXXX, mode 0700, in TMPDIR, RUNTIME_DIRECTORY or /tmp: the first that can be
// written to and that leaves room for `socket_name` in the path of a socket. The caller removes it.
// FAILED_PRECONDITION says what is wrong with each of the three.
absl::StatusOr<std::string> MakeSocketFolder(absl::string_view prefix, absl::string_view socket_name);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_SOCKET_FOLDER_H_
