#include "server/startup/group/parent_link.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace lossd {
namespace {

constexpr size_t kMostLine = 4096;

// A line is far smaller than what a socket takes without waiting.
void SendLine(int file, const std::string& line) {
  const std::string bytes = line + "\n";
  [[maybe_unused]] const ssize_t sent = send(file, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

}  // namespace

absl::StatusOr<ParentLink> ParentLink::Take(int file) {
  const absl::Status none =
      absl::FailedPreconditionError("--group_rank is internal: --devices starts the ranks of a group");
  // Not owned before it is known to be ours: the number may be that of anything.
  std::string line;
  char byte = 0;
  while (line.size() < kMostLine && recv(file, &byte, 1, 0) == 1 && byte != '\n') line.push_back(byte);
  const auto said = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!said.is_object() || !said.contains("token") || !said["token"].is_string()) return none;
  ParentLink link{rpc::FileDescriptor(file)};
  if (fcntl(file, F_SETFD, FD_CLOEXEC) != 0) return none;
  link.token_ = said["token"];
  return link;
}

void ParentLink::TellServing() {
  const nlohmann::json line = {{"serving", true}};
  SendLine(file_.get(), line.dump());
}

void ParentLink::TellDraining() {
  const nlohmann::json line = {{"draining", true}};
  SendLine(file_.get(), line.dump());
}

absl::StatusOr<ChildLink> ChildLink::Open(rpc::FileDescriptor* child) {
  std::array<int, 2> files{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, files.data()) != 0) {
    return absl::UnavailableError(
        absl::StrCat("no socket to a rank can be had: ", std::generic_category().message(errno)));
  }
  *child = rpc::FileDescriptor(files[1]);
  return ChildLink{rpc::FileDescriptor(files[0])};
}

void ChildLink::TellToken(const std::string& token) {
  const nlohmann::json line = {{"token", token}};
  SendLine(file_.get(), line.dump());
}

ChildLink::Said ChildLink::Read() {
  Said said;
  std::array<char, 256> bytes{};
  for (;;) {
    const ssize_t size = recv(file_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return said;
    if (size <= 0 || lines_.size() > kMostLine) {
      file_ = rpc::FileDescriptor();
      return said;
    }
    lines_.append(bytes.data(), static_cast<size_t>(size));
    for (size_t end = lines_.find('\n'); end != std::string::npos; end = lines_.find('\n')) {
      Take(lines_.substr(0, end), &said);
      lines_.erase(0, end + 1);
    }
  }
}

void ChildLink::Take(const std::string& line, Said* said) {
  const auto parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return;
  said->draining = said->draining || parsed.contains("draining");
  said->serving = said->serving || parsed.contains("serving");
}

}  // namespace lossd
