#include "server/rpc/transport/region_socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "lossd/v1/region.pb.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/transport/socket_folder.h"

namespace lossd::rpc {
namespace {

constexpr int kTickMs = 500;
constexpr char kSocketName[] = "regions.sock";

absl::Status CannotShare(const std::string& path, const std::string& why) {
  return engine::MakeError(absl::StatusCode::kFailedPrecondition, engine::RejectReason::kInternal,
                           "region_socket_dir", absl::StrCat("cannot use ", path, " for regions: ", why));
}

absl::Status CannotShare(const std::string& path, int error) {
  return CannotShare(path, std::generic_category().message(error));
}

// Path and family; false if the path is too long.
bool MakeAddress(const std::string& path, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  if (path.size() >= sizeof(address->sun_path)) return false;
  std::memcpy(address->sun_path, path.data(), path.size());
  return true;
}

FileDescriptor NewSocket() {
  return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// One packet, with a file if there is one (>= 0). False if it cannot be sent now: it never has to wait for
// others.
bool Send(int socket, const v1::RegionAttachment& message, int file) {
  std::string bytes = message.SerializeAsString();
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (file >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &file, sizeof(file));
  }
  return sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

void Refuse(int socket, const absl::Status& status) {
  v1::RegionAttachment refusal;
  refusal.set_code(static_cast<int>(status.code()));
  refusal.set_message(std::string(status.message()));
  (void)Send(socket, refusal, -1);
}

// Who is at the other end; PERMISSION_DENIED if it may not be.
absl::StatusOr<int64_t> PeerProcess(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return absl::PermissionDeniedError("the system does not say who the client is");
  }
  if (peer.uid == geteuid() || peer.uid == 0) return peer.pid;
  return absl::PermissionDeniedError(absl::StrCat("the client runs as user ", peer.uid, ", the server as ",
                                                  geteuid(),
                                                  "; regions are for clients of the server's user"));
}

}  // namespace

// Start and end

absl::StatusOr<std::unique_ptr<RegionSocket>> RegionSocket::Start(const std::string& directory,
                                                                  engine::RegionTable* regions) {
  std::unique_ptr<RegionSocket> socket(new RegionSocket(regions));
  if (absl::Status status = socket->MakeDirectory(directory); !status.ok()) return status;
  if (absl::Status status = socket->Listen(); !status.ok()) return status;
  socket->stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!socket->stop_.valid()) return CannotShare(socket->path_, errno);
  socket->thread_ = std::thread([self = socket.get()] { self->Run(); });
  return socket;
}

absl::Status RegionSocket::MakeDirectory(const std::string& directory) {
  if (directory.empty()) {
    absl::StatusOr<std::string> made = MakeSocketFolder("lossd-regions", kSocketName);
    if (!made.ok()) return made.status();
    own_directory_ = *std::move(made);
    path_ = absl::StrCat(own_directory_, "/", kSocketName);
    return absl::OkStatus();
  }
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) return CannotShare(directory, errno);
  struct stat info {};
  if (lstat(directory.c_str(), &info) != 0) return CannotShare(directory, errno);
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0) {
    return CannotShare(directory,
                       "it must be a folder that belongs to the server's user and that nobody else "
                       "can look into (chmod 700)");
  }
  path_ = absl::StrCat(directory, "/", kSocketName);
  return absl::OkStatus();
}

absl::Status RegionSocket::Listen() {
  sockaddr_un address{};
  if (!MakeAddress(path_, &address)) {
    return CannotShare(path_, absl::StrCat("the path is too long for a socket by ",
                                           path_.size() - (sizeof(address.sun_path) - 1),
                                           " bytes; name a shorter --region_socket_dir"));
  }
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address);
  FileDescriptor listener = NewSocket();
  if (!listener.valid()) return CannotShare(path_, errno);
  int failure = bind(listener.get(), generic, sizeof(address)) == 0 ? 0 : errno;
  if (failure == EADDRINUSE) {
    // Left by a server that was killed, unless one answers.
    const FileDescriptor other = NewSocket();
    if (connect(other.get(), generic, sizeof(address)) == 0 || errno != ECONNREFUSED) {
      return CannotShare(path_, "another server uses it");
    }
    unlink(path_.c_str());
    failure = bind(listener.get(), generic, sizeof(address)) == 0 ? 0 : errno;
  }
  if (failure == 0 && listen(listener.get(), 128) != 0) failure = errno;
  if (failure != 0) return CannotShare(path_, failure);
  listener_ = std::move(listener);
  return absl::OkStatus();
}

RegionSocket::~RegionSocket() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    (void)!write(stop_.get(), &one, sizeof(one));
    thread_.join();
  }
  connections_.clear();  // the regions themselves stay their clients'
  if (listener_.valid()) unlink(path_.c_str());
  if (!own_directory_.empty()) rmdir(own_directory_.c_str());
}

// The thread

void RegionSocket::Run() {
  absl::Time next_tick = engine::MonotonicNow();
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign({{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}});
    for (const Connection& connection : connections_) polled.push_back({connection.socket.get(), POLLIN, 0});
    if (poll(polled.data(), polled.size(), kTickMs) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    // From the last one: Close moves the last one to the place of the one that goes.
    for (size_t i = connections_.size(); i-- > 0;) {
      if (polled[i + 2].revents != 0 && !Handle(connections_[i])) Close(i);
    }
    if (polled[1].revents != 0) Accept();
    if (engine::MonotonicNow() < next_tick) continue;
    Tick();
    next_tick = engine::MonotonicNow() + absl::Milliseconds(kTickMs);
  }
}

void RegionSocket::Accept() {
  FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    // Without file descriptors the one that waits cannot be taken, and poll would say so again and again.
    if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return;
  }
  const absl::StatusOr<int64_t> process = PeerProcess(socket.get());
  if (!process.ok()) return Refuse(socket.get(), process.status());
  if (static_cast<int64_t>(connections_.size()) >= 2 * regions_->limits().most) {
    return Refuse(socket.get(), absl::ResourceExhaustedError(absl::StrCat("there are ", connections_.size(),
                                                                          " connections; that is the most")));
  }
  connections_.push_back({std::move(socket), *process, engine::MonotonicNow(), nullptr});
}

bool RegionSocket::Handle(Connection& connection) {
  std::array<char, 64> packet{};
  const ssize_t size = recv(connection.socket.get(), packet.data(), packet.size(), MSG_DONTWAIT);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  // Nothing is the end. A client with a lease has nothing to say.
  if (size == 0 || connection.region != nullptr) return false;
  return Attach(connection, std::string(packet.data(), static_cast<size_t>(size)));
}

bool RegionSocket::Attach(Connection& connection, const std::string& handle) {
  const absl::StatusOr<engine::RegionHandle> parsed = engine::RegionHandle::Parse(handle, "handle");
  if (!parsed.ok()) {
    Refuse(connection.socket.get(), parsed.status());
    return false;
  }
  absl::StatusOr<std::shared_ptr<const engine::Region>> region =
      regions_->Attach(*parsed, connection.process);
  if (!region.ok()) {
    Refuse(connection.socket.get(), region.status());
    return false;
  }
  connection.region = *std::move(region);
  const engine::RegionMemory& memory = connection.region->memory();
  v1::RegionAttachment attachment;
  attachment.set_kind(ToProto(connection.region->kind()));
  attachment.set_bytes(memory.size());
  attachment.set_device_handle(memory.device_handle());
  attachment.set_device_bus_id(memory.device_bus_id());
  return Send(connection.socket.get(), attachment, memory.file());
}

void RegionSocket::Tick() {
  regions_->Expire();
  const absl::Time now = engine::MonotonicNow();
  for (size_t i = connections_.size(); i-- > 0;) {
    if (OutOfTime(connections_[i], now)) Close(i);
  }
}

// Connections that never named a region, and leases of regions that were deleted.
bool RegionSocket::OutOfTime(const Connection& connection, absl::Time now) const {
  if (connection.region == nullptr) return now - connection.accepted > regions_->limits().attach_timeout;
  return !regions_->Find(connection.region->handle(), "handle").ok();
}

void RegionSocket::Close(size_t index) {
  if (connections_[index].region != nullptr) {
    regions_->Drop(connections_[index].region->handle()).IgnoreError();  // perhaps deleted before
  }
  std::swap(connections_[index], connections_.back());
  connections_.pop_back();
}

}  // namespace lossd::rpc
