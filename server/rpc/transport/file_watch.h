// Whether files have changed, by their look alone.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_FILE_WATCH_H_
#define LOSSD_SERVER_RPC_TRANSPORT_FILE_WATCH_H_

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lossd::rpc {

// Whether files are read again although they look as they did.
enum class Look { kIfChanged, kAnyway };

// Not thread-safe.
class FileWatch {
 public:
  explicit FileWatch(std::vector<std::string> paths);
  // Whether one of them is another file, or was written, since the last call. Empty paths never are.
  bool Changed();
  // The result of `read`, an absl::StatusOr, if the files have changed since the last call. After an error
  // each call reads again, since the files may be good another time, but an error is returned only once as
  // long as its message is the same. With kAnyway the files are read, and the result returned, in any case.
  template <typename Read>
  std::optional<std::invoke_result_t<Read>> Reread(Look look, Read read) {
    if (!Changed() && look == Look::kIfChanged) return std::nullopt;
    std::invoke_result_t<Read> found = read();
    std::string failure(found.status().message());
    if (!found.ok()) state_.clear();
    const bool repeated = !found.ok() && failure == failure_;
    failure_ = std::move(failure);
    if (repeated && look == Look::kIfChanged) return std::nullopt;
    return found;
  }

 private:
  // Which file each of them is, and when it was written or its owner or mode changed.
  std::string State() const;

  const std::vector<std::string> paths_;
  std::string state_;    // empty: the next look is a change in any case
  std::string failure_;  // of the last reading; empty: it was good
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_FILE_WATCH_H_
