// Between a rank's process and the parent that started it: a socket that the child inherits. The parent says
// the epoch's token; the leader, or another node's first rank, says that the group serves, and that it has
// begun to end.
#ifndef LOSSD_SERVER_STARTUP_GROUP_PARENT_LINK_H_
#define LOSSD_SERVER_STARTUP_GROUP_PARENT_LINK_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/rpc/transport/file_descriptor.h"

namespace lossd {

// The child's end. Move-only.
class ParentLink {
 public:
  // Takes the inherited file, and reads the token. FAILED_PRECONDITION if no parent is at its other end.
  static absl::StatusOr<ParentLink> Take(int file);

  const std::string& token() const { return token_; }
  void TellServing();
  // The server has begun to end.
  void TellDraining();

 private:
  explicit ParentLink(rpc::FileDescriptor file) : file_(std::move(file)) {}

  rpc::FileDescriptor file_;
  std::string token_;
};

// The parent's end. Move-only.
class ChildLink {
 public:
  ChildLink() = default;
  // `child` gets the other end, which programs that this process starts do not inherit by themselves.
  static absl::StatusOr<ChildLink> Open(rpc::FileDescriptor* child);

  int file() const { return file_.get(); }
  // Empty: there is none.
  void TellToken(const std::string& token);
  // Does not wait: what has come since the last call. Each is told once.
  struct Said {
    bool serving = false;
    bool draining = false;
  };
  Said Read();
  // Nothing more will come.
  bool closed() const { return !file_.valid(); }

 private:
  explicit ChildLink(rpc::FileDescriptor file) : file_(std::move(file)) {}

  static void Take(const std::string& line, Said* said);

  rpc::FileDescriptor file_;
  std::string lines_;  // that have not ended
};

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_PARENT_LINK_H_
