// The unix socket over which clients on the same host get at their regions, and whose connections are their
// leases: when one closes (the client's death closes it), its region is dropped
// (proto/lossd/v1/region.proto).
//
// One thread of its own. Only processes of the server's user, or of root, are let in.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_REGION_SOCKET_H_
#define LOSSD_SERVER_RPC_TRANSPORT_REGION_SOCKET_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/regions/region_table.h"
#include "server/rpc/transport/file_descriptor.h"

namespace lossd::rpc {

class RegionSocket {
 public:
  // In `directory`, which is made if it is not there and must be the server's alone (mode 0700); empty: a new
  // one among the temporary ones, removed in the end. Also drops what nobody attached in time. `regions`
  // outlives it. FAILED_PRECONDITION saying what is wrong with the directory.
  static absl::StatusOr<std::unique_ptr<RegionSocket>> Start(const std::string& directory,
                                                             engine::RegionTable* regions);
  // Ends every lease.
  ~RegionSocket();

  const std::string& path() const { return path_; }

 private:
  // A client's connection: before it has named its region, or its lease.
  struct Connection {
    FileDescriptor socket;
    int64_t process = 0;  // of this host's; 0 if it is none that this server can see
    absl::Time accepted;
    std::shared_ptr<const engine::Region> region;  // null: not attached
  };

  explicit RegionSocket(engine::RegionTable* regions) : regions_(regions) {}
  absl::Status MakeDirectory(const std::string& directory);
  absl::Status Listen();

  void Run();
  void Accept();
  // False: the connection is to be closed.
  bool Handle(Connection& connection);
  bool Attach(Connection& connection, const std::string& handle);
  void Tick();
  bool OutOfTime(const Connection& connection, absl::Time now) const;
  void Close(size_t index);

  engine::RegionTable* const regions_;
  std::string path_;
  std::string own_directory_;  // to be removed
  FileDescriptor listener_;
  FileDescriptor stop_;
  std::vector<Connection> connections_;
  std::thread thread_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_REGION_SOCKET_H_
