#include "tests/support/program.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <utility>

#include "tests/support/scratch_folder.h"
#include "tests/support/wait.h"

namespace lossd::testing {

Program::Program(std::vector<std::string> words, const std::string& output) : name_(words.front()) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  if (!output.empty()) {
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC,
                                     0600);
    posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  }
  const int error = posix_spawn(&process_, name_.c_str(), &files, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (error == 0) return;
  std::cerr << "cannot start " << name_ << "\n";
  std::abort();
}

Program::~Program() {
  if (ended_) return;
  Signal(SIGKILL);
  AwaitEnd();
}

bool Program::HasEnded() {
  int status = 0;
  if (!ended_ && waitpid(process_, &status, WNOHANG) == process_) NoteEnd(status);
  return ended_;
}

void Program::Signal(int signal) const {
  if (!ended_) kill(process_, signal);
}

int Program::AwaitEnd() {
  if (!ended_) NoteEnd(testing::AwaitEnd(name_ + " to end", process_));
  return status_;
}

void Program::NoteEnd(int wait_status) {
  ended_ = true;
  status_ = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -WTERMSIG(wait_status);
}

Ended RunProgram(std::vector<std::string> words) {
  const ScratchFolder folder;
  const std::string output = folder.File("output");
  Program program(std::move(words), output);
  Ended ended{.status = program.AwaitEnd(), .output = ""};
  std::ifstream file(output);
  ended.output.assign(std::istreambuf_iterator<char>(file), {});
  return ended;
}

}  // namespace lossd::testing
