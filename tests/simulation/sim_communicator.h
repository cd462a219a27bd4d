// What a simulated group of two moves data with: the second of the two to come copies for both.
#ifndef LOSSD_TESTS_SIMULATION_SIM_COMMUNICATOR_H_
#define LOSSD_TESTS_SIMULATION_SIM_COMMUNICATOR_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "kernels/collectives/communicator.h"

namespace lossd::simulation {

// Where the two ranks of a communicator meet. The one that waits does not run meanwhile.
class SimMeeting {
 public:
  using Code = kernels::collectives::Code;
  using Met = std::function<bool()>;
  struct Rank {
    std::function<Code()> comes;            // an error: it does not take part
    std::function<Code(const Met&)> waits;  // until `met` says that the other one has been there
  };

  // What one rank gives the other, and gets.
  struct Part {
    kernels::collectives::Operation operation = kernels::collectives::Operation::kBarrier;
    const void* send = nullptr;
    int64_t send_bytes = 0;
    void* receive = nullptr;
    int64_t receive_bytes = 0;
  };

  SimMeeting(Rank leader, Rank other) : ranks_{std::move(leader), std::move(other)} {}
  Code Meet(int rank, const Part& part);

 private:
  const std::array<Rank, 2> ranks_;
  std::array<std::optional<Part>, 2> parts_;  // of whom the other one is waited for
  Code outcome_ = Code::kOk;
};

std::unique_ptr<kernels::collectives::Communicator> MakeSimCommunicator(int rank, SimMeeting* meeting);

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_COMMUNICATOR_H_
