#include "server/startup/out_of_memory.h"

#include <cxxabi.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <exception>
#include <new>
#include <string_view>
#include <system_error>
#include <typeinfo>

#include "server/telemetry/common/log_writer.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

// Nothing here may take memory, so the lines are ready before there is none.
struct LastLine {
  std::string_view text;
  std::string_view json;
};
constexpr LastLine kNoMemory = {
    "E out of memory: ended remedy=\"more memory (or address space: ulimit -v), or less for heads and "
    "clients: --memory_limit_bytes, --staging_bytes\"\n",
    "{\"level\":\"error\",\"event\":\"out of memory: ended\",\"remedy\":\"more memory (or address space: "
    "ulimit -v), or less for heads and clients: --memory_limit_bytes, --staging_bytes\"}\n"};
constexpr LastLine kNoThread = {
    "E no thread could be started: ended remedy=\"raise the limit of threads (ulimit -u, TasksMax, pids.max, "
    "--pids-limit) or of memory, or set OMP_NUM_THREADS to fewer\"\n",
    "{\"level\":\"error\",\"event\":\"no thread could be started: ended\",\"remedy\":\"raise the limit of "
    "threads "
    "(ulimit -u, TasksMax, pids.max, --pids-limit) or of memory, or set OMP_NUM_THREADS to fewer\"}\n"};

[[noreturn]] void End(const LastLine& line) {
  telemetry::FlushLog();
  telemetry::WriteLastLine(STDERR_FILENO,
                           telemetry::Format() == telemetry::LogFormat::kJson ? line.json : line.text);
  _exit(kOutOfMemory);
}

std::terminate_handler terminate_otherwise = nullptr;

// Nobody catches what was thrown. With a handler for `new`, std::bad_alloc comes from libraries that throw it
// themselves; std::system_error from a thread that could not be started.
[[noreturn]] void Terminate() {
  const std::type_info* thrown = abi::__cxa_current_exception_type();
  if (thrown != nullptr && *thrown == typeid(std::bad_alloc)) EndOutOfMemory();
  if (thrown != nullptr && *thrown == typeid(std::system_error)) EndOutOfThreads();
  terminate_otherwise();
  abort();
}

// More than any thread's stack or any buffer of gRPC's takes.
constexpr size_t kSome = size_t{16} << 20;

// gRPC's C core aborts when malloc fails, or writes to where nothing is. Whether memory was the reason is
// seen by asking for some; anything else goes its way, core dump included.
void OnFatalSignal(int number) {
  void* some = mmap(nullptr, kSome, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (some == MAP_FAILED) EndOutOfMemory();
  munmap(some, kSome);
  telemetry::FlushLog();
  signal(number, SIG_DFL);
  raise(number);  // when this returns, also where another process had sent it
}

// Sanitizers keep theirs.
void HandleIfNobodyDoes(int number) {
  struct sigaction present {};
  sigaction(number, nullptr, &present);
  if (present.sa_handler == SIG_DFL) signal(number, OnFatalSignal);
}

}  // namespace

void EndOutOfMemory() { End(kNoMemory); }

void EndOutOfThreads() { End(kNoThread); }

void ExitWhenOutOfMemory() {
  std::set_new_handler(EndOutOfMemory);
  terminate_otherwise = std::set_terminate(Terminate);
  HandleIfNobodyDoes(SIGABRT);
  HandleIfNobodyDoes(SIGSEGV);
}

}  // namespace lossd
