// lossd as a process that keeps checkpoints in a folder of its own and is started again on the same port.
#ifndef LOSSD_TESTS_INTEGRATION_RESTART_LOSSD_PROCESS_H_
#define LOSSD_TESTS_INTEGRATION_RESTART_LOSSD_PROCESS_H_

#include <optional>
#include <string>
#include <vector>

#include "tests/support/program.h"
#include "tests/support/scratch_folder.h"
#include "tests/unit/rpc/held_port.h"

namespace lossd::testing {

// Aborts the test's process if the server does not start. Not thread-safe.
class LossdProcess {
 public:
  explicit LossdProcess(std::vector<std::string> flags = {});

  // With --restore; serves when it returns.
  void Start();
  // SIGTERM, and until it has ended. The exit status.
  int Terminate();
  void Kill();

  std::string target() const { return port_.address(); }
  std::string checkpoint_dir() const { return folder_.File("checkpoints"); }

 private:
  const ScratchFolder folder_;
  const std::vector<std::string> flags_;
  const HeldPort port_;
  std::optional<Program> process_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_RESTART_LOSSD_PROCESS_H_
