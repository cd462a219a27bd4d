// Weights out of safetensors files of the server's own volume.
#ifndef LOSSD_SERVER_RPC_SERVICES_WEIGHT_LOADER_H_
#define LOSSD_SERVER_RPC_SERVICES_WEIGHT_LOADER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"

namespace lossd::rpc {

struct WeightSource {
  std::string head;
  std::string path;         // below the folder: a file, or a folder with an index
  std::string tensor;       // empty: "lm_head.weight", or else the only tensor of the head's shape
  std::string bias_tensor;  // empty: "lm_head.bias"; of a head with a bias
};

struct LoadedWeights {
  uint64_t weight_version = 0;
  std::string tensor;  // the one that was taken
};

// Thread-safe.
class WeightLoader {
 public:
  // `folder` empty: there is none, and nothing can be loaded. The engine outlives the loader.
  WeightLoader(engine::Engine* engine, std::string folder) : engine_(engine), folder_(std::move(folder)) {}

  // Stages the tensor's rows, converting them to what the head's writes are staged in, and publishes them as
  // one version. Blocks while it reads, and says in the log how far it is. Once `cancelled` is true, or the
  // server drains, it stops: CANCELLED or UNAVAILABLE. If it does not succeed nothing is left of it.
  // INVALID_ARGUMENT for hostile files, paths that leave the folder, and tensors of another shape or dtype;
  // FAILED_PRECONDITION without a folder, and while a write is being published; an unfinished one is dropped.
  // ABORTED if another write has dropped this one.
  absl::StatusOr<LoadedWeights> Load(const WeightSource& source,
                                     const std::function<bool()>& cancelled) const;

 private:
  engine::Engine* const engine_;
  const std::string folder_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_WEIGHT_LOADER_H_
