// Programs that a test starts, each a process of its own.
#ifndef LOSSD_TESTS_SUPPORT_PROGRAM_H_
#define LOSSD_TESTS_SUPPORT_PROGRAM_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace lossd::testing {

// A program that runs until it ends; the destructor kills it. A program that cannot be started, or does not
// end within a minute of AwaitEnd, ends the test's process with a message. Not thread-safe.
class Program {
 public:
  // words: the path of the program, and its arguments. output: a file that gets what it prints; empty: the
  // test's own.
  explicit Program(std::vector<std::string> words, const std::string& output = "");
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Whether it has ended by itself; it need not be waited for.
  bool HasEnded();
  void Signal(int signal) const;
  // Waits. Returns the exit status, or minus the signal that ended the program.
  int AwaitEnd();

 private:
  void NoteEnd(int wait_status);

  const std::string name_;
  pid_t process_ = 0;
  bool ended_ = false;
  int status_ = 0;
};

struct Ended {
  int status = 0;      // Program::AwaitEnd
  std::string output;  // what it printed, errors as well
};

// Runs a program to its end.
Ended RunProgram(std::vector<std::string> words);

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_PROGRAM_H_
