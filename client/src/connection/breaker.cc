#include "client/src/connection/breaker.h"

#include <fcntl.h>
#include <grpc/support/sync.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>
#include <utility>
#include <vector>

// What ChannelArguments::SetSocketMutator takes: the headers that are installed name the type and leave out
// what it is. gRPC has never changed it but by adding a function at the end of the table, null if it is of no
// use.
struct grpc_mutate_socket_info;
struct grpc_socket_mutator_vtable {
  bool (*mutate_fd)(int socket, grpc_socket_mutator* mutator);
  int (*compare)(grpc_socket_mutator* a, grpc_socket_mutator* b);
  void (*destroy)(grpc_socket_mutator* mutator);
  bool (*mutate_fd_2)(const grpc_mutate_socket_info* info, grpc_socket_mutator* mutator);
};
struct grpc_socket_mutator {
  const grpc_socket_mutator_vtable* vtable;
  gpr_refcount refcount;
};

namespace lossd::internal {

// The channel's sockets, which gRPC owns and closes: descriptor and inode of each. The inode shows whether
// the descriptor still is that socket. A duplicate would keep a closed socket in gRPC's epoll set, and gRPC
// would take its events for events of the next connection.
class Breaker::Sockets {
 public:
  void Note(int socket) {
    const std::lock_guard lock(mutex_);
    std::erase_if(sockets_, [](const Socket& each) { return !each.IsAt(each.number); });
    struct stat file = {};
    if (fstat(socket, &file) == 0) sockets_.push_back({socket, file.st_ino});
  }
  // A channel may have two connections for a while: both are shut down.
  void ShutDown() {
    const std::lock_guard lock(mutex_);
    for (const Socket& each : sockets_) {
      // Closing a duplicate of another file would drop the process's locks on that.
      const int socket = each.IsAt(each.number) ? fcntl(each.number, F_DUPFD_CLOEXEC, 0) : -1;
      if (socket < 0) continue;
      if (each.IsAt(socket)) shutdown(socket, SHUT_RDWR);  // gRPC may have closed the number meanwhile
      close(socket);
    }
  }

 private:
  struct Socket {
    int number;
    ino_t inode;

    bool IsAt(int descriptor) const {
      struct stat file = {};
      return fstat(descriptor, &file) == 0 && S_ISSOCK(file.st_mode) && file.st_ino == inode;
    }
  };

  std::mutex mutex_;
  std::vector<Socket> sockets_;
};

struct Breaker::Mutator : grpc_socket_mutator {
  explicit Mutator(std::shared_ptr<Sockets> of) : grpc_socket_mutator{&kTable, {}}, sockets(std::move(of)) {
    gpr_ref_init(&refcount, 1);
  }

  static bool Note(int socket, grpc_socket_mutator* mutator) {
    static_cast<Mutator*>(mutator)->sockets->Note(socket);
    return true;
  }
  static int Compare(grpc_socket_mutator* a, grpc_socket_mutator* b) {
    const auto* const of_a = static_cast<Mutator*>(a)->sockets.get();
    const auto* const of_b = static_cast<Mutator*>(b)->sockets.get();
    return of_a == of_b ? 0 : (of_a < of_b ? -1 : 1);
  }
  static void Destroy(grpc_socket_mutator* mutator) { delete static_cast<Mutator*>(mutator); }

  static constexpr grpc_socket_mutator_vtable kTable = {&Note, &Compare, &Destroy, nullptr};
  const std::shared_ptr<Sockets> sockets;
};

Breaker::Breaker() : sockets_(std::make_shared<Sockets>()) {}
Breaker::~Breaker() = default;

void Breaker::AddTo(grpc::ChannelArguments* arguments) const {
  arguments->SetSocketMutator(new Mutator(sockets_));  // which takes it over
}

void Breaker::Break() const { sockets_->ShutDown(); }

}  // namespace lossd::internal
