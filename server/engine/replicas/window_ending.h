// The coordinator's side of the end of a window: docs/decisions/0022-replicas.md. The protocol is
// tests/model/replicas.pml, where this is Coordinator.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_

#include <memory>

#include "server/engine/head/head.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/replicas/joint_replicas.h"

namespace lossd::engine {

// Ends the window of `head`, the coordinator's, and of its replicas: seal, sum, and by what `end` says step,
// hold the flush, or open again after a look, each when all have done the one before; or with a fate ends the
// flush that holds it. The coordinator comes last, and then who waits at `head` is answered; UNAVAILABLE if a
// replica is lost before. Waits, and is called by one thread, one ending after the other.
void EndWindow(const std::shared_ptr<Head>& head, const WindowEnd& end, const JointReplicas& replicas);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_
