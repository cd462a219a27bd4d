// What the tests of communicators need of the library under test.
#ifndef LOSSD_TESTS_UNIT_COLLECTIVES_BACKEND_H_
#define LOSSD_TESTS_UNIT_COLLECTIVES_BACKEND_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/collectives/communicator.h"
#include "tests/unit/collectives/ranks.h"

namespace lossd::kernels::collectives::testing {

// Memory that a communicator moves. Set and Get copy from and to the host, and return when that is done.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* data() = 0;
  virtual void Set(const void* from, int64_t bytes) = 0;
  virtual void Get(void* to, int64_t bytes) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  // Why it cannot have so many ranks here; empty if it can. Must leave the process fit to be forked.
  virtual std::string Missing(int ranks) = 0;

  // Whether a rank that died is noticed before the timeout.
  virtual bool NoticesLostPeers() = 0;
  // Enough to connect and for small calls, and short enough to wait for in a test.
  virtual std::chrono::milliseconds ShortTimeout() = 0;

  // The rest is called in a rank's process.
  virtual Result Connect(Rank& rank, std::chrono::milliseconds timeout,
                         std::unique_ptr<Communicator>* communicator) = 0;
  virtual std::unique_ptr<Memory> Allocate(int64_t bytes) = 0;
  virtual void* Stream() = 0;
};

// The one that the program is linked with.
Backend& BackendUnderTest();

}  // namespace lossd::kernels::collectives::testing

#endif  // LOSSD_TESTS_UNIT_COLLECTIVES_BACKEND_H_
