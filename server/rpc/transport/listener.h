// Sockets that listen on an address.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_LISTENER_H_
#define LOSSD_SERVER_RPC_TRANSPORT_LISTENER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/rpc/transport/file_descriptor.h"
#include "server/rpc/transport/listen_address.h"

namespace lossd::rpc {

class Listener {
 public:
  // Whether whoever connects is told the port, or has to be started with it: what to do if it is taken.
  enum class Port { kOwn, kOfAll };

  // On an address of ParseListen; connections wait from now on. 0.0.0.0 and [::] both are every address of
  // the machine, as with gRPC's own sockets. The name of a host may stand for several addresses, with one
  // port; those that the machine does not have are left out. The file of a Unix socket is for the owner and
  // the group alone; that of a server which is no more is replaced. UNAVAILABLE, saying why, if the address
  // cannot be had; ALREADY_EXISTS if the file of a Unix socket is none, or a server answers there.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const std::string& address, Port port = Port::kOwn);

  // The same sockets without listening: nobody can connect, and whoever asks the system for a free port is
  // not given this one, while Open() has it as before. Nothing is held of a Unix socket.
  static absl::StatusOr<std::unique_ptr<Listener>> Hold(const std::string& address);

  // Closes them; the file of a Unix socket goes.
  ~Listener();

  // Non-blocking; at least one, but for what Hold() has of a Unix socket.
  const std::vector<FileDescriptor>& sockets() const { return sockets_; }
  int port() const { return port_; }  // 0: a Unix socket

 private:
  enum class Use { kListen, kHold };

  Listener() = default;
  absl::Status OpenFile(const std::string& path);
  absl::Status OpenHost(const HostPort& address, Use use);

  std::vector<FileDescriptor> sockets_;
  int port_ = 0;
  std::string path_;  // of a Unix socket
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_LISTENER_H_
