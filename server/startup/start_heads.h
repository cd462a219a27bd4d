// The heads of the configuration file, as they are made at start.
#ifndef LOSSD_SERVER_STARTUP_START_HEADS_H_
#define LOSSD_SERVER_STARTUP_START_HEADS_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/engine.h"
#include "server/startup/head_entry.h"

namespace lossd {

// Creates them, and loads those that name weights and have none yet: when this returns they are published.
// Loads stop, with CANCELLED, once `cancelled` is true. The first error ends it.
absl::Status StartHeads(const std::vector<HeadEntry>& heads, const std::string& weights_dir,
                        const std::function<bool()>& cancelled, engine::Engine* engine);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_START_HEADS_H_
