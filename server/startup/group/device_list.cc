#include "server/startup/group/device_list.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/shard.h"
#include "server/engine/device/device_factory.h"
#include "server/rpc/transport/file_descriptor.h"

namespace lossd {
namespace {

constexpr size_t kMostRanks = kernels::kMostRanks;
// What can be read until nobody can write any more.
std::string ReadAll(int file) {
  std::string all;
  std::array<char, 256> bytes{};
  for (;;) {
    const ssize_t size = read(file, bytes.data(), bytes.size());
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return all;
    all.append(bytes.data(), static_cast<size_t>(size));
  }
}

// A process of its own asks the driver. Empty if there are none, or that cannot be found out.
std::string AllAccelerators() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return "";
  const rpc::FileDescriptor names(ends[0]);
  rpc::FileDescriptor end(ends[1]);
  const pid_t child = fork();
  if (child == 0) {
    const std::string all = absl::StrJoin(engine::AllAccelerators(), ",");
    _exit(write(end.get(), all.data(), all.size()) < 0 ? EXIT_FAILURE : 0);
  }
  end = rpc::FileDescriptor();
  std::string all = ReadAll(names.get());
  while (child > 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return all;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseDevices(const std::string& text) {
  const auto invalid = [&text](const auto&... why) {
    return absl::InvalidArgumentError(absl::StrCat("--devices is '", text, "'; ", why...));
  };
  const std::string list = text == "all" ? AllAccelerators() : text;
  if (list.empty()) return invalid("no CUDA device can be used here: name devices, such as cpu,cpu");
  std::vector<std::string> names = absl::StrSplit(list, ',');
  if (names.size() > kMostRanks) {
    return invalid("these are ", names.size(), " devices, and a group has at most ", kMostRanks,
                   ": name those that it shall have");
  }
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (name == "auto" || !engine::IsDeviceName(name)) {
      return invalid("'", name,
                     "' is none: it must be all, or a list of cpu, cuda:0, cuda:1, ... with commas");
    }
    if (engine::KindOf(name) != engine::KindOf(names.front())) {
      return invalid("a group has devices of one kind: either cpu for each rank, or CUDA devices alone");
    }
    if (!seen.insert(name).second && name != "cpu") {
      return invalid(name, " is there twice: each rank needs a CUDA device of its own");
    }
  }
  return names;
}

absl::Status CheckRanks(int32_t nodes, size_t devices_of_each) {
  if (devices_of_each <= kMostRanks / static_cast<size_t>(nodes)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the group has ", nodes, " nodes with ", devices_of_each,
                                                 " devices each, and may have at most ", kMostRanks,
                                                 " devices in all"));
}

}  // namespace lossd
