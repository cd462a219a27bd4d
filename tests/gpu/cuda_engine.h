// The engine on the first CUDA device, with one head that has a problem's weights.
#ifndef LOSSD_TESTS_GPU_CUDA_ENGINE_H_
#define LOSSD_TESTS_GPU_CUDA_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/unit/engine/engine_fixture.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::engine {

// A session of one lane with a stream.
struct Stream {
  std::shared_ptr<RecordingListener> listener;
  LaneAttachment lane;
};

class CudaEngine {
 public:
  // Null if there is no device, or none that takes heads of the problem's type.
  static std::unique_ptr<CudaEngine> Create(const kernels::testing::Problem& problem,
                                            EngineOptions options = {}, int64_t pinned_bytes = 0,
                                            int64_t held_bytes = 0);

  Stream Open(const std::string& client_key) const;
  // Rows [first, first + tokens) of the problem.
  Chunk Cut(uint64_t sequence, int64_t first, int64_t tokens) const;
  void Submit(const Stream& stream, Chunk chunk) const;
  // Publishes the problem's weights once more.
  void WriteWeights() const;
  // Ends the window: dW [V, H].
  std::vector<float> TakeGradient() const;

  Device* device = nullptr;  // the engine's
  std::unique_ptr<Engine> engine;
  std::shared_ptr<Head> head;

 private:
  explicit CudaEngine(const kernels::testing::Problem& problem) : problem_(problem) {}

  const kernels::testing::Problem problem_;
};

// An answer's losses and dX, in fp32.
std::vector<float> LossesOf(const ChunkAnswer& answer);
std::vector<float> InputGradientsOf(const ChunkAnswer& answer);

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_GPU_CUDA_ENGINE_H_
