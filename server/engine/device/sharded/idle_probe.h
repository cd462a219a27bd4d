// Looks after the devices of a group that nobody has anything for.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SHARDED_IDLE_PROBE_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SHARDED_IDLE_PROBE_H_

#include <chrono>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/sharded/rank_watch.h"
#include "server/engine/group/rank_channel.h"

namespace lossd::engine {

// The leader's. When it was done with its last command some seconds ago, all ranks are told to have their
// devices make a round trip (ProbeCommand), and so does the leader's, in a thread of its own. A device that
// does not come back, or says that it has failed, shows as a command that lasts.
class IdleProbe {
 public:
  static constexpr std::chrono::seconds kIdle{3};

  // All outlive it. Probes when nothing was done for `idle`.
  IdleProbe(Device* local, RankWatch* watch, RankChannel* channel, std::chrono::milliseconds idle = kIdle);
  // Waits for a round trip that is under way. It ends with what the device does: at once on the host, and on
  // a GPU, where nothing is queued before it, unless the GPU hangs. Then there is no bound, here or in
  // whatever of the device is given back next, which waits for the GPU, too: who told the process to end ends
  // it for good by a second signal, or by SIGKILL after a time, as systemd and the kubelet do. By then the
  // leader has answered its clients and saved its heads.
  ~IdleProbe();
  IdleProbe(const IdleProbe&) = delete;
  IdleProbe& operator=(const IdleProbe&) = delete;

 private:
  void Run(std::chrono::milliseconds idle) ABSL_LOCKS_EXCLUDED(mutex_);
  void Probe() ABSL_LOCKS_EXCLUDED(mutex_);
  // False: it is the end.
  bool Await(std::chrono::milliseconds time) ABSL_LOCKS_EXCLUDED(mutex_);

  Device* const local_;
  RankWatch* const watch_;
  RankChannel* const channel_;
  Mutex mutex_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the above
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SHARDED_IDLE_PROBE_H_
