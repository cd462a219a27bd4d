// The real engine with one head, as a process that can be drained, killed and started again. Its device's
// loop is run step by step.
#ifndef LOSSD_TESTS_SIMULATION_SIM_SERVER_H_
#define LOSSD_TESTS_SIMULATION_SIM_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/engine.h"
#include "tests/simulation/sim_device.h"
#include "tests/simulation/workload.h"

namespace lossd::simulation {

inline constexpr char kHead[] = "lm_head";

struct ServerOptions {
  SimDeviceOptions device;
  engine::HeadConfig head;
  // Where checkpoints go, of all schedules of a run, one after the other.
  std::string checkpoint_folder;
};

// One thread's.
class SimServer {
 public:
  SimServer(const ServerOptions& options, Sabotage sabotage);
  ~SimServer();

  engine::Engine& engine() { return *engine_; }
  // Null if it is not there.
  std::shared_ptr<engine::Head> head() const;
  SimGate& gate() { return gate_; }

  // Runs what waits for the disk, or for the device, while the device goes on by itself.
  void Run(const std::function<void()>& call);
  // Creates the head, with these weights; their version.
  uint64_t Create(const Values& weights);
  Values Weights();
  // Rows [first, first + rows) of `weights` as a part of this write.
  absl::Status WriteRows(const std::string& write, const Values& weights, int64_t first, int64_t rows);

  // SIGTERM, and the next start. Everything accepted is finished; `streams_end` is called between.
  absl::Status Drain(const std::function<void()>& streams_end);
  // kill -9, and the next start: with the newest checkpoint, or without a head.
  absl::Status Kill();

 private:
  void Start(const std::string& incarnation);
  void Stop();

  const ServerOptions options_;
  SimGate gate_;
  std::shared_ptr<engine::CheckpointStore> store_;
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_SERVER_H_
