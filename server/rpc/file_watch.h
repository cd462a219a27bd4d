// Whether files have changed, by their look alone.
#ifndef LOSSD_SERVER_RPC_FILE_WATCH_H_
#define LOSSD_SERVER_RPC_FILE_WATCH_H_

#include <string>
#include <vector>

namespace lossd::rpc {

// Not thread-safe.
class FileWatch {
 public:
  explicit FileWatch(std::vector<std::string> paths);
  // Whether one of them is another file, or was written, since the last call. Empty paths never are.
  bool Changed();
  // The next call tells a change in any case: what was found could not be used, and may be another time.
  void Forget() { state_.clear(); }

 private:
  // Of each file: which one it is, and when it was written or its owner or mode changed.
  std::string State() const;

  const std::vector<std::string> paths_;
  std::string state_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_FILE_WATCH_H_
