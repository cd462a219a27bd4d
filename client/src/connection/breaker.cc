#include "client/src/connection/breaker.h"

#include <fcntl.h>
#include <grpc/support/sync.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <utility>

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

// The socket that was made last. A descriptor of its own: gRPC may close its one at any time, which shuts the
// connection down for both.
class Breaker::Sockets {
 public:
  ~Sockets() { Replace(-1); }
  void Note(int socket) { Replace(fcntl(socket, F_DUPFD_CLOEXEC, 0)); }
  void ShutDown() {
    const std::lock_guard lock(mutex_);
    if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
  }

 private:
  void Replace(int socket) {
    const std::lock_guard lock(mutex_);
    if (socket_ >= 0) close(socket_);
    socket_ = socket;
  }

  std::mutex mutex_;
  int socket_ = -1;
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
