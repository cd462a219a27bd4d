// lossd as a process that keeps checkpoints in a folder of its own and is started again on the same port.
#ifndef LOSSD_TESTS_INTEGRATION_RESTART_LOSSD_PROCESS_H_
#define LOSSD_TESTS_INTEGRATION_RESTART_LOSSD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "tests/unit/rpc/held_port.h"

namespace lossd::testing {

// Aborts the test's process if the server does not start. Not thread-safe.
class LossdProcess {
 public:
  explicit LossdProcess(std::vector<std::string> flags = {});
  ~LossdProcess();  // killed, if it runs; the folder goes with it
  LossdProcess(const LossdProcess&) = delete;
  LossdProcess& operator=(const LossdProcess&) = delete;

  // With --restore; serves when it returns.
  void Start();
  // SIGTERM, and until it has ended. The exit status.
  int Terminate();
  void Kill();

  std::string target() const { return port_.address(); }
  std::string checkpoint_dir() const { return folder_ + "/checkpoints"; }

 private:
  int Wait();

  std::string folder_;
  std::vector<std::string> flags_;
  const HeldPort port_;
  pid_t process_ = 0;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_RESTART_LOSSD_PROCESS_H_
