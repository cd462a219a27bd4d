// How the process ends when it has no memory left for what it cannot refuse.
#ifndef LOSSD_SERVER_STARTUP_OUT_OF_MEMORY_H_
#define LOSSD_SERVER_STARTUP_OUT_OF_MEMORY_H_

namespace lossd {

// The exit status when there was no memory, or no thread could be started.
constexpr int kOutOfMemory = 3;

// From now on the process ends at once, with a line on standard error and kOutOfMemory, when `new` or a
// library finds no memory, or a thread cannot be started. Large memory (weights, gradients, what clients
// have under way) is not asked for with `new`: it is refused with RESOURCE_EXHAUSTED, and the process goes
// on.
//
// It does not throw: gRPC swallows what a callback throws, so the call would hang with half of its work done,
// and threads that wait for each other would keep the process from ending. For clients it is a crash like
// any other: what was in a checkpoint is safe, and the rest is sent again. Once, before other threads start.
void ExitWhenOutOfMemory();

// Every handler ends here: these functions log the shortage and its remedy, and end the process.
[[noreturn]] void EndOutOfMemory();
[[noreturn]] void EndOutOfThreads();

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_OUT_OF_MEMORY_H_
