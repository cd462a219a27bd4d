// Processes that have been killed and are not gone: they hold locks and ports until the system has their
// memory back, which takes a while if that is large.
#ifndef LOSSD_SERVER_STARTUP_GROUP_ENDING_PROCESSES_H_
#define LOSSD_SERVER_STARTUP_GROUP_ENDING_PROCESSES_H_

#include <sys/types.h>

#include <filesystem>
#include <vector>

namespace lossd {

// Whether the process is beyond what it does itself.
bool HasBegunToEnd(pid_t pid);

// The other processes of this name and this user that have begun to end, or will at once. Ranks are among
// them as soon as their parent is gone, since they are killed then. `proc` is the kernel's.
std::vector<pid_t> EndingProcesses(const std::filesystem::path& proc = "/proc");

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_ENDING_PROCESSES_H_
