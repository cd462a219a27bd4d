#include "client/src/connection/call_metadata.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/src/connection/channel_arguments.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/trace.h"
#include "proto/wire/token.h"

namespace lossd::internal {
namespace {

constexpr size_t kLargestFile = size_t{1} << 16;  // blanks around the token are allowed

// Which file it is, and when it was written or its owner or mode changed.
std::string LookOf(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return "";
  return absl::StrCat(status.st_dev, ":", status.st_ino, ":", status.st_size, ":", status.st_mtim.tv_sec, ":",
                      status.st_mtim.tv_nsec, ":", status.st_ctim.tv_sec, ":", status.st_ctim.tv_nsec);
}

bool IsToken(absl::string_view text) {
  return !text.empty() && text.size() <= wire::kLongestToken &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)); });
}

// Every call waits for it: what never ends, or comes when another writes it, is not read at all.
absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  const absl::Cleanup closed = [file] {
    if (file >= 0) close(file);
  };
  struct stat status {};
  if (file >= 0 && fstat(file, &status) == 0 && !S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_file: '", path, "' must be a regular file: no folder, pipe or device"));
  }
  std::string text(kLargestFile + 1, '\0');
  size_t size = 0;
  ssize_t count = file >= 0 ? 1 : -1;
  while (count > 0 && size < text.size()) {
    count = read(file, text.data() + size, text.size() - size);
    if (count > 0) size += static_cast<size_t>(count);
  }
  if (count < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_file: cannot read '", path, "'; it must be a file that this user may read"));
  }
  if (size > kLargestFile) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_file: '", path, "' must be a file of at most ", kLargestFile, " bytes"));
  }
  text.resize(size);
  return text;
}

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadWhole(path);
  if (!text.ok()) return text.status();
  const absl::string_view token = absl::StripAsciiWhitespace(*text);
  if (IsToken(token)) return std::string(token);
  return absl::InvalidArgumentError(absl::StrCat(
      "token_file: '", path, "' must hold one token and nothing else, of at most ", wire::kLongestToken,
      " visible characters; a line of lossd's own --tokens file has it as its second word"));
}

constexpr absl::string_view kSocketFile = "unix:";

// Who made the socket file of this target; none if it is no such target, or there is no file.
std::optional<uid_t> OwnerOf(absl::string_view target) {
  if (!absl::ConsumePrefix(&target, kSocketFile)) return std::nullopt;
  absl::ConsumePrefix(&target, "//");
  struct stat status {};
  if (lstat(std::string(target).c_str(), &status) != 0 || !S_ISSOCK(status.st_mode)) return std::nullopt;
  return status.st_uid;
}

}  // namespace

absl::Status CheckTokenMayGo(const std::string& place, const std::string& target,
                             const ClientOptions& options) {
  if (options.token_file.empty() || options.tls.has_value()) return absl::OkStatus();
  const std::optional<uid_t> owner = OwnerOf(target);
  if (owner.has_value() && OwnerOf(place) == owner) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("without TLS the token goes to ", target, " alone, and not to ", place,
                   ", since nothing would tell who listens there; connect over TLS, or to a socket file, or "
                   "name that address, too, among those to connect to"));
}

absl::StatusOr<std::shared_ptr<CallMetadata>> CallMetadata::Create(const std::string& target,
                                                                   const ClientOptions& options) {
  std::shared_ptr<CallMetadata> metadata(new CallMetadata(options));
  if (options.token_file.empty()) return metadata;
  if (!options.tls.has_value() && !options.token_over_plain_text && !IsLoopback(target)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token_file: the token would travel to ", target,
        " in plain text, where others can read it; connect over TLS (ClientOptions::tls, --tls_ca), or set "
        "token_over_plain_text (--token_over_plain_text) if something else encrypts it on the way"));
  }
  const std::lock_guard lock(metadata->mutex_);
  if (absl::Status status = metadata->ReadLocked(); !status.ok()) return status;
  return metadata;
}

absl::Status CallMetadata::ReadLocked() {
  look_ = LookOf(path_);  // before it is read, so that no change is missed
  absl::StatusOr<std::string> token = ReadToken(path_);
  if (!token.ok()) {
    look_.clear();  // the next call tries again: the reason may be gone without a change of the file
    return token.status();
  }
  std::string authorization = absl::StrCat("Bearer ", *token);
  if (authorization == authorization_) return absl::OkStatus();
  authorization_ = std::move(authorization);
  ++generation_;
  return absl::OkStatus();
}

void CallMetadata::RefreshLocked() {
  if (LookOf(path_) != look_) ReadLocked().IgnoreError();
}

uint64_t CallMetadata::AddTo(grpc::ClientContext* context) {
  AddTrace(trace_, context);
  if (path_.empty()) return 0;
  const std::lock_guard lock(mutex_);
  RefreshLocked();
  context->AddMetadata("authorization", authorization_);
  return generation_;
}

absl::Status CallMetadata::Judge(const absl::Status& status, uint64_t added) {
  if (path_.empty() || (!absl::IsUnauthenticated(status) && !absl::IsPermissionDenied(status))) return status;
  const std::lock_guard lock(mutex_);
  RefreshLocked();
  if (generation_ == added) return status;
  return absl::UnavailableError(
      absl::StrCat("the token was refused and has been replaced since: ", status.message()));
}

}  // namespace lossd::internal
