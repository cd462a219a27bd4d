// One program run to its end.
#ifndef LOSSD_BENCH_KERNELS_CHILD_PROCESS_H_
#define LOSSD_BENCH_KERNELS_CHILD_PROCESS_H_

#include <chrono>
#include <string>
#include <vector>

namespace lossd::bench {

struct ChildResult {
  std::string output;   // what it wrote to standard output
  std::string problem;  // empty, or what became of it instead of an exit
  int exit_status = -1;
};

// Runs command[0], looked for in PATH, with standard error appended to the file `log`; kills it when it takes
// longer than `timeout`.
ChildResult RunChild(const std::vector<std::string>& command, const std::string& log,
                     std::chrono::seconds timeout);

// Where this program is.
std::string OwnPath();

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_KERNELS_CHILD_PROCESS_H_
