// Deterministic sessions of a head: a gradient for each, to which rows are added in tiles at fixed places.
#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

constexpr char kWindowToken[] = "window_token";
constexpr int64_t kMostPlace = std::numeric_limits<int64_t>::max() / 2;

}  // namespace

absl::StatusOr<bool> Head::NeedsGradient(const std::string& client_key, int32_t rank) {
  const std::lock_guard lock(mutex_);
  if (!ended_.ok()) return ended_;
  std::string id;
  if (frozen() || ledger_.FindByKey(client_key, &id) != nullptr) return false;
  if (absl::Status status = CheckRankLocked(client_key, rank); !status.ok()) return status;
  return true;
}

// The order of the sum must not depend on who came first.
absl::Status Head::CheckRankLocked(const std::string& client_key, int32_t rank) const {
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state != AccumulationLedger::SessionState::kOpen || session.rank != rank) continue;
    if (!deterministic_.contains(id)) continue;
    return Invalid(
        RejectReason::kOption, "rank",
        absl::StrCat("rank is ", rank, " for client_key '", client_key, "' and for '", session.client_key,
                     "'; deterministic sessions of a head must have different ones"));
  }
  return absl::OkStatus();
}

DeterministicTiles* Head::TilesOfLocked(const std::string& session_id) {
  const auto it = deterministic_.find(session_id);
  return it == deterministic_.end() ? nullptr : &it->second->tiles;
}

absl::Status Head::CheckPlaceLocked(const DeterministicTiles& tiles, const Chunk& chunk) {
  if (!chunk.window_token.has_value()) {
    return Invalid(
        RejectReason::kOption, kWindowToken,
        "window_token is not set; chunks of a deterministic session must say their place in the window");
  }
  const int64_t place = *chunk.window_token;
  if (place < 0 || place > kMostPlace) {
    return Invalid(RejectReason::kOption, kWindowToken,
                   absl::StrCat("window_token is ", place, "; it must be in [0, ", kMostPlace, "]"));
  }
  if (chunk.options.distillation.has_value()) {
    return Invalid(RejectReason::kOption, "options.distillation",
                   "options.distillation is set; chunks of a deterministic session have no soft targets");
  }
  if (chunk.hidden_states.place() == MemoryPlace::kDevice) {
    return Invalid(
        RejectReason::kOption, "hidden_states_region",
        "hidden_states_region is of the device's memory; chunks of a deterministic session must be in "
        "the host's");
  }
  switch (tiles.RoomFor(chunk)) {
    case DeterministicTiles::Room::kFree:
      return absl::OkStatus();
    case DeterministicTiles::Room::kTaken:
      return Invalid(RejectReason::kOption, kWindowToken,
                     absl::StrCat("window_token is ", place, "; tokens of this window have places in [",
                                  place, ", ", place + chunk.tokens, ") already"));
    default:
      return MakeError(
          absl::StatusCode::kResourceExhausted, RejectReason::kOutOfMemory, kWindowToken,
          absl::StrCat("window_token is ", place,
                       "; there is no memory for tokens so far ahead of the first that is missing, and "
                       "no other lane of the session can bring that"));
  }
}

// A tile may outlive its chunks' answers, after which a client may write to its region again.
void Head::KeepOperands(Chunk& chunk) {
  const Payload& hidden_states = chunk.hidden_states;
  const bool in_region = hidden_states.size() > 0 && hidden_states.kept_bytes() == 0;
  if (in_region && hidden_states.place() != MemoryPlace::kDevice) {
    chunk.hidden_states = hidden_states.Gathered();
  }
}

bool Head::MustWaitForRoomLocked(const LaneAttachment& attachment, const Chunk& chunk) {
  const DeterministicTiles* tiles = TilesOfLocked(attachment.session_id);
  if (tiles == nullptr || chunk.mode != ComputeMode::kLossAndGradients) return false;
  const int64_t place = chunk.window_token.value_or(-1);
  if (place < 0 || place > kMostPlace || chunk.tokens < 1 ||
      chunk.tokens > environment_.limits.max_chunk_tokens) {
    return false;  // it will be rejected
  }
  const DeterministicTiles::Room room = tiles->RoomFor(chunk);
  if (room == DeterministicTiles::Room::kLater) return true;
  if (room != DeterministicTiles::Room::kNone) return false;
  DeterministicSession& session = *deterministic_.at(attachment.session_id);
  const absl::Time now = MonotonicNow();
  session.waiting_since = std::min(session.waiting_since, now);
  if (now - session.waiting_since >= environment_.place_timeout) return false;
  const size_t lanes = ledger_.Find(attachment.session_id)->lanes.size();
  for (size_t lane = 0; lane < lanes; ++lane) {
    if (lane == static_cast<size_t>(attachment.lane)) continue;
    const auto other = lanes_.find({attachment.session_id, static_cast<int32_t>(lane)});
    if (other == lanes_.end() || !other->second.resume) return true;
  }
  return false;
}

void Head::ResumeStalled() {
  std::vector<std::function<void()>> waiters;
  {
    const std::lock_guard lock(mutex_);
    const absl::Time before = MonotonicNow() - environment_.place_timeout;
    for (const auto& [id, session] : deterministic_) {
      if (session->waiting_since > before) continue;
      for (auto& waiter : TakeWaitersLocked(id)) waiters.push_back(std::move(waiter));
    }
  }
  for (const auto& waiter : waiters) waiter();
}

void Head::GiveUpPlaceLocked(ChunkItem& item) {
  if (item.deterministic == nullptr || item.kind != ItemKind::kPlaced) return;
  item.deterministic->tiles.GiveUp(*item.chunk.window_token, item.chunk.tokens, item.kept_bytes);
  item.deterministic = nullptr;
  // The lock is held, and those who wait come back at once.
  environment_.scheduler->Post(nullptr, [self = shared_from_this(), session = item.session_id] {
    std::vector<std::function<void()>> waiters;
    {
      const std::lock_guard lock(self->mutex_);
      waiters = self->TakeWaitersLocked(session);
    }
    for (const auto& waiter : waiters) waiter();
  });
}

RowKind Head::TileKind(RowKind of_chunk, Gradient* gradient) {
  of_chunk.mode = ComputeMode::kWeightGradientOnly;
  of_chunk.dx_type = {};
  of_chunk.returns = {};
  of_chunk.gradient = gradient;
  return of_chunk;
}

// The device thread's: a chunk that was answered, and the tiles that it completes.
void Head::FillTiles(StartedChunk& chunk) {
  ChunkItem& item = *chunk.item;
  const RowKind kind = TileKind(item.row_kind, item.deterministic->memory.gradient.get());
  item.chunk.dx = {};
  std::vector<std::shared_ptr<ChunkItem>> pieces;
  std::vector<std::function<void()>> waiters;
  {
    const std::lock_guard lock(mutex_);
    DeterministicTiles& tiles = item.deterministic->tiles;
    tiles.Fill(std::move(item.chunk), kind, item.kept_bytes);
    pieces = ItemsOf(item.deterministic, tiles.TakeComplete());
    waiters = TakeWaitersLocked(item.session_id);
  }
  for (std::shared_ptr<ChunkItem>& piece : pieces) {
    environment_.scheduler->FollowUpWith(shared_from_this(), std::move(piece));
  }
  for (const auto& waiter : waiters) waiter();
}

std::vector<std::shared_ptr<Head::ChunkItem>> Head::ItemsOf(
    const std::shared_ptr<DeterministicSession>& session, std::vector<DeterministicTiles::Piece> pieces) {
  std::vector<std::shared_ptr<ChunkItem>> items;
  for (DeterministicTiles::Piece& piece : pieces) {
    auto item = std::make_shared<ChunkItem>();
    item->row_kind = piece.kind;
    item->rows = piece.chunk.tokens;
    item->session = session->number;
    item->session_id = session->id;
    item->kind = ItemKind::kWeightGradient;
    item->state = ItemState::kStarted;
    item->numbered = false;
    item->deterministic = session;
    item->accepted = absl::Now();
    item->chunk = std::move(piece.chunk);
    item->piece = std::move(piece);
    items.push_back(std::move(item));
  }
  return items;
}

// Before the window ends, or is looked at as a whole, or new weights come.
std::vector<std::shared_ptr<QueuedChunk>> Head::TakeUnfinished() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<QueuedChunk>> items;
  if (!ended_.ok()) return items;
  // A call that is to fail must leave no trace, and what it is about is settled by now.
  const bool conditional = !last_tasks_.empty() && last_tasks_.front().has_value();
  if (conditional && !ledger_.Match(*last_tasks_.front()).ok()) return items;
  for (const auto& [id, session] : deterministic_) {
    for (std::shared_ptr<ChunkItem>& item : ItemsOf(session, session->tiles.TakeAll())) {
      items.push_back(std::move(item));
    }
  }
  return items;
}

void Head::FinishPiece(ChunkItem& item) {
  std::vector<std::function<void()>> waiters;
  {
    const std::lock_guard lock(mutex_);
    item.deterministic->tiles.Done(item.piece);
    waiters = TakeWaitersLocked(item.session_id);
  }
  for (const auto& waiter : waiters) waiter();
}

// Gradients of sessions that are no more go on the device thread, after the batches that add to them.
void Head::DropGradientsLocked() {
  for (auto it = deterministic_.begin(); it != deterministic_.end();) {
    if (ledger_.Find(it->first) != nullptr) {
      ++it;
      continue;
    }
    environment_.scheduler->Post(
        this,
        [self = shared_from_this(), session = std::move(it->second)]() mutable { Drop(session->memory); });
    it = deterministic_.erase(it);
  }
}

std::vector<std::shared_ptr<DeterministicSession>> Head::DeterministicInOrder() const {
  std::vector<std::shared_ptr<DeterministicSession>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, session] : deterministic_) all.push_back(session);
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return std::tie(a->rank, a->number) < std::tie(b->rank, b->number);
  });
  return all;
}

// The window's gradient and those of the sessions, one after the other.
absl::Status Head::ReadGradientSum(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  return SumOverGradients(of, rows * config_.hidden_size, out, [&](const Gradient* gradient, float* values) {
    return backend_->ReadGradient(gradient, first_row, rows, values);
  });
}

absl::Status Head::ReadBiasGradientSum(const Gradient* of, int64_t first_row, int64_t rows, float* out) {
  return SumOverGradients(of, rows, out, [&](const Gradient* gradient, float* values) {
    return backend_->ReadBiasGradient(gradient, first_row, rows, values);
  });
}

absl::Status Head::SumOverGradients(
    const Gradient* of, int64_t count, float* out,
    absl::FunctionRef<absl::Status(const Gradient* gradient, float* values)> read) {
  if (absl::Status status = read(of, out); !status.ok()) return status;
  std::vector<float> more;
  for (const auto& session : DeterministicInOrder()) {
    more.resize(static_cast<size_t>(count));
    if (absl::Status status = read(session->memory.gradient.get(), more.data()); !status.ok()) return status;
    for (size_t i = 0; i < more.size(); ++i) out[i] += more[i];
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
