// Stands before the system's pthread_create in this program and its libraries.
//
// gRPC goes on without a thread that could not be started, and waits for it when it shuts down; OpenMP calls
// exit(), which destroys what other threads use. Both hang. With nothing left to start a thread with, the
// process ends as it does without memory. std::thread throws, and whoever starts one may do without.
#include <dlfcn.h>
#include <pthread.h>

#include <string_view>

#include "server/startup/out_of_memory.h"

namespace {

bool GoesOnWithoutThread(const void* caller) {
  Dl_info library{};
  if (dladdr(caller, &library) == 0 || library.dli_fname == nullptr) return false;
  const std::string_view name = library.dli_fname;
  return name.find("/libgpr.") != name.npos || name.find("/libgomp.") != name.npos;
}

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  const int error = create(thread, attributes, run, argument);
  if (error != 0 && GoesOnWithoutThread(__builtin_return_address(0))) lossd::EndOutOfThreads();
  return error;
}
