#include "tests/integration/restart/lossd_process.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "tests/support/wait.h"

namespace lossd::testing {
namespace {

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "lossd_process: %s\n", what);
  std::abort();
}

}  // namespace

LossdProcess::LossdProcess(std::vector<std::string> flags) : flags_(std::move(flags)) {
  std::string name = (std::filesystem::temp_directory_path() / "lossd-restart-XXXXXX").string();
  folder_ = mkdtemp(name.data());
  Start();
}

LossdProcess::~LossdProcess() {
  Kill();
  std::filesystem::remove_all(folder_);
}

void LossdProcess::Start() {
  const std::string port_file = folder_ + "/port";
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
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  if (posix_spawn(&process_, LOSSD_BINARY, nullptr, nullptr, arguments.data(), environ) != 0) {
    Die("cannot start " LOSSD_BINARY);
  }
  Await("lossd to serve", [&] {
    if (waitpid(process_, nullptr, WNOHANG) != 0) Die("lossd ended before it served");
    return std::filesystem::exists(port_file);
  });
}

int LossdProcess::Wait() {
  const int status = AwaitEnd("lossd to end", std::exchange(process_, 0));
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int LossdProcess::Terminate() {
  kill(process_, SIGTERM);
  return Wait();
}

void LossdProcess::Kill() {
  if (process_ == 0) return;
  kill(process_, SIGKILL);
  Wait();
}

}  // namespace lossd::testing
