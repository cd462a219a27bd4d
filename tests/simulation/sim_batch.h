// A batch on a simulated device, which has the whole vocabulary or one rank's rows of it.
#ifndef LOSSD_TESTS_SIMULATION_SIM_BATCH_H_
#define LOSSD_TESTS_SIMULATION_SIM_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/device/head_backend.h"

namespace lossd::simulation {

struct SimGradient : engine::Gradient {
  SimGradient(size_t rows, size_t hidden) : dw(rows * hidden), db(rows) {}
  void Clear();

  std::vector<float> dw;
  std::vector<float> db;
};

// The rows of a head that are here.
struct SimWeights {
  SimWeights(int64_t vocab_rows, int64_t hidden_size, const engine::HeadShard& of_shard)
      : rows(static_cast<size_t>(vocab_rows)),
        hidden(static_cast<size_t>(hidden_size)),
        shard(of_shard),
        matrix(rows * hidden),
        bias(rows) {}
  // Nothing if another rank has it.
  std::optional<size_t> RowOf(int64_t label) const;

  const size_t rows;
  const size_t hidden;
  const engine::HeadShard shard;
  std::vector<float> matrix;
  std::vector<float> bias;
};

// What it is made with outlives it.
class SimBatch {
 public:
  SimBatch(const engine::BatchKey& kind, std::span<const engine::ChunkRows> chunks,
           engine::BatchCallbacks callbacks, const SimWeights* weights, SimGradient* gradient);

  // Losses and dX of all chunks, in which every rank of a group takes part. Its error is the batch's.
  absl::Status Compute();
  bool computed() const { return computed_; }
  // Puts those of the next chunk where they belong, and tells so.
  void AnswerNext();
  bool AllAnswered() const { return answered_ == chunks_.size(); }
  const engine::BatchKey& kind() const { return kind_; }
  const std::vector<engine::ChunkRows>& chunks() const { return chunks_; }
  // To dW and db, what this rank's rows get of a chunk.
  void Add(size_t chunk);
  void End(absl::StatusOr<engine::BatchReport> report) { callbacks_.on_done(std::move(report)); }

 private:
  // By token: the loss, then dX.
  size_t ResultSize() const { return 1 + weights_->hidden; }
  // The simulation's clients know the leader alone, which holds all batches.
  bool answers() const { return weights_->shard.leads(); }
  absl::Status SpreadHiddenStates();
  void ComputeOwn();
  // The answering rank gets what other ranks have computed.
  absl::Status CollectResults();

  engine::BatchKey kind_;
  std::vector<engine::ChunkRows> chunks_;
  engine::BatchCallbacks callbacks_;
  const SimWeights* weights_;
  SimGradient* gradient_;
  std::vector<size_t> first_tokens_;  // by chunk; then the number of all
  std::vector<float> hidden_states_;  // of all chunks
  std::vector<float> results_;
  bool computed_ = false;
  size_t answered_ = 0;
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_BATCH_H_
