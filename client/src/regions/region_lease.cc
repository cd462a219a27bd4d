#include "client/src/regions/region_lease.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "client/src/regions/region_attachment.h"

namespace lossd::internal {
namespace {

absl::Status Unreachable(const std::string& path, int error) {
  return absl::FailedPreconditionError(absl::StrCat(
      "cannot reach the server's socket ", path, " (", std::generic_category().message(error),
      "): regions are for clients on the server's host, of its user; between containers, share the folder of "
      "--region_socket_dir"));
}

// What a call on a socket may take, in slices.
class SlicedWait {
 public:
  SlicedWait(std::chrono::milliseconds timeout, const Question& question)
      : end_(std::chrono::steady_clock::now() + timeout), question_(question) {}

  // After an error that a slice's end leaves, or a signal: whether to try again. Not OK: what to end with.
  absl::StatusOr<bool> GoesOn(int error) const {
    if (error == EINTR) return true;
    if (error != EAGAIN && error != EWOULDBLOCK) return false;
    if (question_ != nullptr) {
      if (absl::Status asked = question_(); !asked.ok()) return asked;
    }
    return std::chrono::steady_clock::now() < end_;
  }

 private:
  const std::chrono::steady_clock::time_point end_;
  const Question& question_;
};

absl::StatusOr<File> Connect(const std::string& path, const SlicedWait& wait) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) return Unreachable(path, ENAMETOOLONG);
  std::memcpy(address.sun_path, path.data(), path.size());
  File socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) return Unreachable(path, errno);
  const timeval slice{0, std::chrono::microseconds(kWaitSlice).count()};
  (void)setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof(slice));
  (void)setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof(slice));
  while (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const int error = errno;
    const auto goes_on = wait.GoesOn(error);
    if (!goes_on.ok()) return goes_on.status();
    if (!*goes_on) return Unreachable(path, error);
  }
  return socket;
}

// One packet, and the file that came with it.
absl::StatusOr<std::string> Receive(int socket, const SlicedWait& wait, File* file) {
  std::string bytes(size_t{64} << 10, '\0');
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t size = 0;
  while ((size = recvmsg(socket, &header, MSG_CMSG_CLOEXEC)) <= 0) {
    const int error = errno;
    const auto goes_on = size == 0 ? false : wait.GoesOn(error);
    if (!goes_on.ok()) return goes_on.status();
    if (*goes_on) continue;
    return absl::UnavailableError(
        absl::StrCat("the server did not let the region be attached: ",
                     size == 0 ? "it closed the connection" : std::generic_category().message(error)));
  }
  const cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof(int))) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(rights), sizeof(received));
    *file = File(received);
  }
  bytes.resize(static_cast<size_t>(size));
  return bytes;
}

}  // namespace

File::~File() {
  if (file_ >= 0) close(file_);
}

absl::StatusOr<RegionLease> RegionLease::Attach(const std::string& socket_path, const std::string& handle,
                                                std::chrono::milliseconds timeout, const Question& question) {
  const SlicedWait wait(timeout, question);
  auto socket = Connect(socket_path, wait);
  if (!socket.ok()) return socket.status();
  RegionLease lease;
  lease.socket_ = *std::move(socket);
  // A server that refuses at once may have closed by now; its answer says why.
  (void)send(lease.socket_.get(), handle.data(), handle.size(), MSG_NOSIGNAL);
  const auto packet = Receive(lease.socket_.get(), wait, &lease.memory_);
  if (!packet.ok()) return packet.status();
  absl::StatusOr<v1::RegionAttachment> attachment = ParseRegionAttachment(*packet);
  if (!attachment.ok()) return attachment.status();
  lease.attachment_ = *std::move(attachment);
  return lease;
}

bool RegionLease::Alive() const {
  // The server never says anything: whatever there is to be read is the end.
  pollfd polled{socket_.get(), POLLIN, 0};
  return poll(&polled, 1, 0) == 0;
}

}  // namespace lossd::internal
