// A device for simulations: plain sums of small integers, so that fp32 holds them exactly, in batches that
// stay under way until they are told to go on; and one that can be made to do what no device may.
#ifndef LOSSD_TESTS_SIMULATION_SIM_DEVICE_H_
#define LOSSD_TESTS_SIMULATION_SIM_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>

#include "server/engine/device/head_backend.h"

namespace lossd::simulation {

// What a broken server would do, once in a while: the oracle has to notice each of them.
enum class Sabotage {
  kNone,
  kRepeatsCount,    // a repeated chunk is added once more
  kChunkLost,       // a chunk is answered and not added
  kResetForgotten,  // the next window begins with the last one's gradient
  kStepTwice,       // a step is taken twice
  kFoldLost,        // what an aborted flush's second gradient holds is dropped
  // By a group of ranks:
  kMarkBeforeRanks,  // batches count as applied that a rank has not applied
  kRankSkipsBatch,   // a rank reports a batch that it did not add
  kOldEpochCounts,   // what arrives late of an old epoch is taken
  kMarkWithoutLost,  // batches count as applied that a rank which is lost has not applied
  // By replicas:
  kReplicaLeftOut,   // what one has is not in the sum
  kGatherForgotten,  // one steps its rows, and goes on with its own of those that another one steps
  kBrokenForgotten,  // heads go on as alike, though a step of theirs had begun and was not over
};

// How far batches may go. Shared by a schedule and its devices of one rank, one after the other. One
// thread's.
struct SimGate {
  bool free = false;                     // at once to their end
  int answers = 0;                       // so many chunks more may be answered,
  int ends = 0;                          // and so many answered batches end
  std::function<void()> on_write_state;  // called once, in the middle of a restore
  Sabotage sabotage = Sabotage::kNone;
  int64_t sabotaged = 0;  // how often
  // Set for a rank that does not lead, and asked before a batch is added, last of all. It may wait;
  // false: the rank is no more.
  std::function<bool()> before_adding;
  std::set<uint64_t> added;  // items, of chunks outside deterministic sessions

  // Whether this is the occasion: every third one.
  bool Strikes(Sabotage what);

 private:
  int64_t occasions_ = 0;
};

struct SimDeviceOptions {
  int64_t most_batches = 1;
  int64_t rows_per_batch = 1;
};

// A device for which a valid token with label l and hidden state x has the loss W[l]·x + b[l], dX is W[l]
// times the chunk's scale, and dW[l] += scale * x, db[l] += scale. A step is W -= learning_rate * scale * dW,
// likewise b.
std::unique_ptr<engine::Device> MakeSimDevice(SimGate* gate, SimDeviceOptions options);

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_DEVICE_H_
