// A chunk on its way through a head, from its submission until it is applied.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_CHUNK_ITEM_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_CHUNK_ITEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/head/parts/deterministic_session.h"
#include "server/engine/head/parts/deterministic_tiles.h"
#include "server/engine/head/parts/lane.h"
#include "server/engine/schedule/session_queues.h"

namespace lossd::engine {

class Head;

struct ChunkItem : QueuedChunk {
  enum class State { kQueued, kStarted, kWithdrawn };
  // Where a chunk's dW goes: nowhere (loss only, a frozen head, a repeat), with its batch into the gradient
  // of its key, or into the tiles of its deterministic session.
  enum class WeightGradient { kNone, kWithBatch, kIntoTiles };

  State state = State::kQueued;  // guarded by Head::mutex_
  WeightGradient weight_gradient = WeightGradient::kNone;
  bool repeat = false;      // it was taken before: computed again, and counted nowhere
  bool remembered = false;  // if it is rejected, the ledger knows it (AccumulationLedger::Reject)
  absl::Status rejection;   // not ok: it costs the device nothing, and is answered in its turn
  std::string session_id;
  int32_t lane = 0;
  std::shared_ptr<LaneListener> listener;
  Chunk chunk;
  std::shared_ptr<Head> teacher;  // of a distillation; does not change once it is queued
  // Keeps the teacher from being parked and, over replicas, from being stepped, blended or restored.
  std::shared_ptr<const void> lesson;
  absl::Time accepted;
  int64_t valid_tokens = 0;  // once answered
  // For chunks whose dW goes into tiles, with what they count there, and for pieces of tiles.
  std::shared_ptr<DeterministicSession> deterministic;
  DeterministicTiles::Bytes kept;
  DeterministicTiles::Piece piece;

  bool rejected() const { return !rejection.ok(); }
  // dW of rows that were answered before: of a tile that is complete.
  bool is_piece() const { return chunk.mode == ComputeMode::kWeightGradientOnly; }
  // Whether it has a sequence of its own in its lane.
  bool numbered() const { return !repeat && !is_piece(); }
  // Whether it counts in the window once it is answered.
  bool in_window() const { return !rejected() && weight_gradient != WeightGradient::kNone; }
  void Reject(absl::Status why) {
    rejection = std::move(why);
    rows = 0;
    chunk.DropPayload();
  }
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_CHUNK_ITEM_H_
