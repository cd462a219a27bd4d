// A process that has no file descriptors left, for a while.
#ifndef LOSSD_TESTS_UNIT_RPC_NO_FILES_H_
#define LOSSD_TESTS_UNIT_RPC_NO_FILES_H_

#include <sys/resource.h>

#include <cstdlib>

namespace lossd::testing {

// While it lives no file can be opened; those that are open stay, and files can be looked at.
class NoFileCanBeOpened {
 public:
  NoFileCanBeOpened() {
    if (getrlimit(RLIMIT_NOFILE, &before_) != 0) std::abort();
    rlimit none = before_;
    none.rlim_cur = 0;
    if (setrlimit(RLIMIT_NOFILE, &none) != 0) std::abort();
  }
  ~NoFileCanBeOpened() { (void)setrlimit(RLIMIT_NOFILE, &before_); }
  NoFileCanBeOpened(const NoFileCanBeOpened&) = delete;
  NoFileCanBeOpened& operator=(const NoFileCanBeOpened&) = delete;

 private:
  rlimit before_{};
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_UNIT_RPC_NO_FILES_H_
