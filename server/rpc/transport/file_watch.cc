#include "server/rpc/transport/file_watch.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::rpc {

FileWatch::FileWatch(std::vector<std::string> paths) : paths_(std::move(paths)), state_(State()) {}

bool FileWatch::Changed() {
  std::string state = State();
  if (state == state_) return false;
  if (state != State()) return false;  // in the middle of a change, which the next call sees whole
  state_ = std::move(state);
  return true;
}

std::string FileWatch::State() const {
  std::string state;
  for (const std::string& path : paths_) {
    struct stat status {};
    if (path.empty() || stat(path.c_str(), &status) != 0) status = {};
    absl::StrAppend(&state, status.st_dev, ":", status.st_ino, ":", status.st_size, ":",
                    status.st_mtim.tv_sec, ":", status.st_mtim.tv_nsec, ":", status.st_ctim.tv_sec, ":",
                    status.st_ctim.tv_nsec, ";");
  }
  return state;
}

}  // namespace lossd::rpc
