#include "tests/integration/restart/lossd_process.h"

#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <utility>

#include "tests/support/wait.h"

namespace lossd::testing {

LossdProcess::LossdProcess(std::vector<std::string> flags) : flags_(std::move(flags)) { Start(); }

void LossdProcess::Start() {
  const std::string port_file = folder_.File("port");
  std::filesystem::remove(port_file);
  std::vector<std::string> words = {LOSSD_BINARY,
                                    "--listen=" + target(),
                                    "--metrics_listen=",
                                    "--device=cpu",
                                    "--workspace_bytes=16777216",
                                    "--restore",
                                    "--checkpoint_dir=" + checkpoint_dir(),
                                    "--port_file=" + port_file};
  words.insert(words.end(), flags_.begin(), flags_.end());
  process_.emplace(std::move(words));
  Await("lossd to serve", [&] {
    if (process_->HasEnded()) {
      std::cerr << "lossd ended before it served\n";
      std::abort();
    }
    return std::filesystem::exists(port_file);
  });
}

int LossdProcess::Terminate() {
  process_->Signal(SIGTERM);
  return process_->AwaitEnd();
}

void LossdProcess::Kill() { process_.reset(); }

}  // namespace lossd::testing
