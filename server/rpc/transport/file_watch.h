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
  // What `read`, which gives an absl::StatusOr, finds in files that have changed since the last call. What is
  // no good is read again by each call, since it may be good another time, but told of only once as long as
  // the reason is the same. With kAnyway they are read and told of in any case.
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
