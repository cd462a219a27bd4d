// dW of chunks that were answered without it: their operands stay, and they come to the device once more.
#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/engine/head.h"
#include "server/engine/staging.h"

namespace lossd::engine {

void Head::PlaceOperands(Chunk& chunk, bool is_new, const std::string& session_id) {
  if (frozen() || chunk.kept) return;
  bool deterministic = false;
  {
    const std::lock_guard lock(mutex_);
    deterministic = TilesOfLocked(session_id) != nullptr;
  }
  // A region is not kept: the client may write to it once it has the answer.
  const bool in_region = chunk.hidden_states.size() > 0 && chunk.hidden_states.kept_bytes() == 0;
  const bool of_host = chunk.hidden_states.place() != MemoryPlace::kDevice;
  if (deterministic && in_region && of_host) chunk.hidden_states = chunk.hidden_states.Gathered();
  if (!config_.defers()) return;
  std::shared_ptr<DeferredOperands> operands;
  // With soft targets the teacher's operands and weights would have to stay too.
  const bool can_wait = of_host && !chunk.options.distillation.has_value();
  if (is_new && !deterministic && can_wait && chunk.mode == ComputeMode::kLossAndGradients) {
    const std::lock_guard lock(mutex_);
    operands = deferred_operands_;
  }
  if (operands != nullptr) {
    if (std::optional<Payload> kept = operands->Keep(chunk.hidden_states, chunk.token_bytes())) {
      chunk.hidden_states = *std::move(kept);
      chunk.kept = true;
      return;
    }
    environment_.scheduler->HurryFollowUps(this);
  }
  chunk.hidden_states = Staged(std::move(chunk.hidden_states), environment_.device);
}

// A batch whose dW is made for one of its chunks makes it for all: it costs nothing more.
void Head::JoinWeightGradients(std::deque<StartedChunk>& chunks) {
  const auto is = [](ItemKind kind) {
    return [kind](const StartedChunk& chunk) { return chunk.item->kind == kind; };
  };
  if (std::none_of(chunks.begin(), chunks.end(), is(ItemKind::kAccumulate))) return;
  for (StartedChunk& chunk : chunks) {
    if (chunk.item->kind == ItemKind::kDeferred) chunk.item->kind = ItemKind::kAccumulate;
  }
}

void Head::FollowUp(StartedChunk& chunk) {
  const std::shared_ptr<ChunkItem>& answered = chunk.item;
  auto item = std::make_shared<ChunkItem>();
  item->row_kind = answered->row_kind;
  item->row_kind.mode = ComputeMode::kWeightGradientOnly;
  item->row_kind.dx_type = {};
  item->row_kind.returns = {};
  item->rows = answered->rows;
  item->session = answered->session;
  item->kind = ItemKind::kWeightGradient;
  item->state = ItemState::kStarted;
  item->session_id = answered->session_id;
  item->lane = answered->lane;
  item->accepted = chunk.answered;
  item->valid_tokens = answered->valid_tokens;
  item->chunk = std::move(answered->chunk);
  item->chunk.mode = ComputeMode::kWeightGradientOnly;
  item->chunk.dx = {};
  item->chunk.timing = Timing::kNone;
  environment_.scheduler->FollowUpWith(shared_from_this(), std::move(item), engine::FollowUp::kWhenIdle);
}

}  // namespace lossd::engine
