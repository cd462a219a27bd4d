// Programs that are run to their end.
#ifndef LOSSD_CLIENT_TOOLS_PERF_CHILD_PROCESS_H_
#define LOSSD_CLIENT_TOOLS_PERF_CHILD_PROCESS_H_

#include <string>
#include <vector>

namespace lossd::perf {

enum class ChildOutput { kShow, kDiscard };

// Runs command[0], looked for in PATH, to its end; whether it ended with status 0.
bool Succeeds(std::vector<std::string> command, ChildOutput output);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_CHILD_PROCESS_H_
