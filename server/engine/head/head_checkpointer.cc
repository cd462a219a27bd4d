// Checkpoints of a head: all that it is, written and read between two batches.
#include "server/engine/head/head_checkpointer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/device/batch_key.h"

namespace lossd::engine {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

absl::Status Refused(absl::StatusCode code, absl::string_view message) {
  return MakeError(code, RejectReason::kCheckpoint, "head", message);
}

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& values, int64_t count) {
  return std::as_bytes(std::span(values).first(static_cast<size_t>(count)));
}

// Calls `take` with [first, first + count) until there are no more rows of so many bytes.
absl::Status ForPieces(int64_t rows, int64_t row_bytes,
                       absl::FunctionRef<absl::Status(int64_t first, int64_t count)> take) {
  const int64_t most = std::max<int64_t>(1, kPieceBytes / row_bytes);
  for (int64_t first = 0; first < rows; first += most) {
    if (absl::Status taken = take(first, std::min(most, rows - first)); !taken.ok()) return taken;
  }
  return absl::OkStatus();
}

size_t PieceRows(int64_t rows, int64_t row_bytes) {
  return static_cast<size_t>(std::min(rows, std::max<int64_t>(1, kPieceBytes / row_bytes)));
}

bool IsWeight(const std::string& tensor) {
  return tensor == "weight" || tensor == "master_weight" || tensor == "bias";
}

// All of `tiles.kept`, one chunk behind the other.
absl::Status AppendTiles(const DeterministicTiles::Content& tiles, const StateSink::Append& append) {
  for (const Chunk& chunk : tiles.kept) {
    for (const std::string* values : {&chunk.labels, &chunk.token_weights, &chunk.lse_gradients}) {
      if (absl::Status status = append(std::as_bytes(std::span(*values))); !status.ok()) return status;
    }
    for (const ByteSpan part : chunk.hidden_states.parts()) {
      if (absl::Status status = append(part); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

// --- Saving
// ------------------------------------------------------------------------------------------------------------

std::optional<absl::StatusOr<HeadCheckpoint>> HeadCheckpointer::Save(Head::SaveAs as, StateSink* sink) {
  HeadCheckpoint checkpoint;
  GradientFiles gradients;
  {
    const std::lock_guard lock(head_.mutex_);
    // With the same lock as what follows: an abort between the two would have the window say more than its
    // gradient holds.
    if (head_.window_work_ > 0) return std::nullopt;
    if (absl::Status status = DescribeLocked(as, &checkpoint, &gradients); !status.ok()) return status;
  }
  if (checkpoint.weight_version > 0) checkpoint.tensors = head_.backend_->StateTensors();
  absl::Status device;  // a failure of it is none of the disk's
  absl::Status status;
  for (const StateTensor& tensor : checkpoint.tensors) {
    status.Update(SaveTensor(tensor, sink, &device));
  }
  for (const auto& [name, gradient] : gradients) {
    checkpoint.gradients.push_back(name);
    if (status.ok()) status = SaveGradient(name, gradient, sink, &device);
  }
  for (const SessionCheckpoint& session : checkpoint.sessions) {
    if (!status.ok() || !session.tiles.has_value() || session.tiles->kept.empty()) continue;
    status = sink->Add(TilesFile(session.session.number), "",
                       [&session](const auto& append) { return AppendTiles(*session.tiles, append); });
  }
  if (!device.ok()) head_.EndByFailure(device);
  if (!status.ok()) return status;
  return checkpoint;
}

absl::Status HeadCheckpointer::DescribeLocked(Head::SaveAs as, HeadCheckpoint* checkpoint,
                                              GradientFiles* gradients) const {
  if (!head_.ended_.ok()) return head_.ended_;
  const bool frozen_window = head_.window_.state == WindowState::kFrozen;
  if (frozen_window && as == Head::SaveAs::kTagged) {
    return Refused(absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("the window of head ", head_.config_.name, " is frozen by flush ",
                                head_.window_.flush.flush_id, ": commit or abort it first"));
  }
  checkpoint->config = head_.config_;
  checkpoint->incarnation = head_.environment_.incarnation;
  checkpoint->restores = head_.restores_;
  checkpoint->weight_version = head_.weight_version_;
  checkpoint->optimizer_steps = head_.optimizer_steps_;
  checkpoint->last_committed_write = head_.last_committed_write_;
  checkpoint->last_committed_version = head_.last_committed_version_;
  // What is only about to end the window has done nothing yet.
  checkpoint->window = head_.window_;
  if (!frozen_window) checkpoint->window.state = WindowState::kOpen;
  checkpoint->window.flush_waiters.clear();
  checkpoint->window.step_waiters.clear();
  checkpoint->window.step.reset();
  checkpoint->last_session_number = head_.ledger_.last_number();
  for (const auto& [id, session] : head_.ledger_.sessions()) {
    checkpoint->sessions.push_back({id, session, std::nullopt});
    if (absl::Status status = DescribeSessionLocked(&checkpoint->sessions.back()); !status.ok()) {
      return status;
    }
  }
  if (!head_.frozen()) NameGradientsLocked(*checkpoint, gradients);
  return absl::OkStatus();
}

absl::Status HeadCheckpointer::DescribeSessionLocked(SessionCheckpoint* entry) const {
  std::vector<AccumulationLedger::Lane>& lanes = entry->session.lanes;
  std::map<int64_t, int64_t> claimed;
  for (size_t i = 0; i < lanes.size(); ++i) {
    // What is queued is not in the checkpoint: its client sends it again.
    lanes[i].accepted = lanes[i].started;
    if (lanes[i].applied != lanes[i].started) {
      return absl::InternalError(
          absl::StrCat("session ", entry->id, " has chunks under way between two batches"));
    }
    const auto runtime = head_.lanes_.find({entry->id, static_cast<int32_t>(i)});
    if (runtime == head_.lanes_.end()) continue;
    for (const auto& item : runtime->second.queued) {
      if (item->kind == Head::ItemKind::kPlaced) {
        claimed.emplace(*item->chunk.window_token, item->chunk.tokens);
      }
    }
  }
  const auto deterministic = head_.deterministic_.find(entry->id);
  if (deterministic != head_.deterministic_.end()) {
    entry->tiles = deterministic->second->tiles.content(claimed);
  }
  return absl::OkStatus();
}

// Those to which anything was added.
void HeadCheckpointer::NameGradientsLocked(const HeadCheckpoint& checkpoint, GradientFiles* gradients) const {
  bool window = false;
  bool next = false;
  const bool frozen_window = head_.window_.state == WindowState::kFrozen;
  for (const SessionCheckpoint& entry : checkpoint.sessions) {
    bool contributed = false;
    for (const AccumulationLedger::Lane& lane : entry.session.lanes) {
      contributed = contributed || (frozen_window ? lane.next_base : lane.accepted) > lane.base;
      next = next || (frozen_window && lane.accepted > lane.next_base);
    }
    const auto deterministic = head_.deterministic_.find(entry.id);
    if (deterministic == head_.deterministic_.end()) {
      window = window || contributed;
    } else if (contributed) {
      gradients->emplace_back(SessionGradient(entry.session.number),
                              deterministic->second->memory.gradient.get());
    }
  }
  if (window) gradients->emplace_back(kOwnGradient, head_.window_gradient_);
  if (next && head_.second_gradient_ != nullptr) {
    gradients->emplace_back(kNextGradient, head_.OtherGradientLocked());
  }
}

// Files that have the same key have the same content.
std::string HeadCheckpointer::KeyOf(const StateTensor& tensor) const {
  const std::lock_guard lock(head_.mutex_);
  return IsWeight(tensor.name)
             ? absl::StrCat(head_.number_, ".", head_.restores_, ".", head_.weight_version_)
             : absl::StrCat(head_.number_, ".", head_.restores_, ".", head_.optimizer_steps_);
}

std::string HeadCheckpointer::KeyOfGradients() const {
  const std::lock_guard lock(head_.mutex_);
  return absl::StrCat(head_.number_, ".", head_.restores_, ".", head_.window_.generation, ".",
                      head_.gradient_changes_);
}

absl::Status HeadCheckpointer::SaveTensor(const StateTensor& tensor, StateSink* sink, absl::Status* device) {
  const int64_t row_bytes = tensor.columns * kernels::SizeOf(tensor.type);
  return sink->Add(TensorFile(tensor.name), KeyOf(tensor), [&](const StateSink::Append& append) {
    std::vector<std::byte> piece(PieceRows(tensor.rows, row_bytes) * static_cast<size_t>(row_bytes));
    return ForPieces(tensor.rows, row_bytes, [&](int64_t first, int64_t count) {
      *device = head_.backend_->ReadState(tensor.name, first, count, piece.data());
      return device->ok() ? append(Bytes(piece, count * row_bytes)) : *device;
    });
  });
}

absl::Status HeadCheckpointer::SaveGradient(const std::string& name, const Gradient* gradient,
                                            StateSink* sink, absl::Status* device) {
  const auto save = [&](const std::string& file, int64_t columns, auto read) {
    const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float));
    return sink->Add(file, KeyOfGradients(), [&](const StateSink::Append& append) {
      std::vector<float> piece(PieceRows(head_.config_.vocab_size, row_bytes) * static_cast<size_t>(columns));
      return ForPieces(head_.config_.vocab_size, row_bytes, [&](int64_t first, int64_t count) {
        *device = read(first, count, piece.data());
        return device->ok() ? append(Bytes(piece, count * columns)) : *device;
      });
    });
  };
  absl::Status saved = save(name, head_.config_.hidden_size, [&](int64_t first, int64_t count, float* out) {
    return head_.backend_->ReadGradient(gradient, first, count, out);
  });
  if (!saved.ok() || !head_.config_.bias) return saved;
  return save(BiasOf(name), 1, [&](int64_t first, int64_t count, float* out) {
    return head_.backend_->ReadBiasGradient(gradient, first, count, out);
  });
}

// --- Restoring
// ---------------------------------------------------------------------------------------------------------

absl::StatusOr<FileKeys> HeadCheckpointer::Restore(Head::RestoreAs as, const RestoreNumbers& numbers,
                                                   const StateSource& source,
                                                   std::vector<SessionMemory> memory) {
  const HeadCheckpoint& checkpoint = source.checkpoint();
  absl::Status status = BeginRestore(checkpoint, &memory);
  // From here on there is no way back.
  if (status.ok()) {
    status = RestoreTensors(source);
    RestoredSessions sessions;
    if (status.ok()) status = RestoreSessions(source, std::move(memory), &sessions);
    if (status.ok()) status = RestoreWindowGradients(as, source);
    if (!status.ok()) {
      if (device_.ok()) {
        EndInPieces(status);
      } else {
        head_.EndByFailure(device_);
      }
      return status;
    }
    TakeOver(as, numbers, checkpoint, std::move(sessions));
  }
  if (!status.ok()) return status;
  FileKeys keys;
  for (const StateTensor& tensor : checkpoint.tensors) {
    keys.emplace_back(TensorFile(tensor.name), KeyOf(tensor));
  }
  return keys;
}

absl::Status HeadCheckpointer::BeginRestore(const HeadCheckpoint& checkpoint,
                                            std::vector<SessionMemory>* memory) {
  const std::lock_guard lock(head_.mutex_);
  absl::Status status = CheckRestorableLocked(checkpoint, static_cast<int64_t>(memory->size()));
  if (!status.ok()) return status;
  // Now: sessions may be closed meanwhile, and take with them what they have.
  for (const auto& [id, session] : head_.deterministic_) memory->push_back(std::move(session->memory));
  head_.restoring_ = MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                               absl::StrCat("head ", head_.config_.name, " is being restored"));
  return absl::OkStatus();
}

absl::Status HeadCheckpointer::CheckRestorableLocked(const HeadCheckpoint& checkpoint,
                                                     int64_t more_memory) const {
  const auto refuse = [this](auto... why) {
    return Refused(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("the checkpoint cannot be restored to head ", head_.config_.name, ": ", why...));
  };
  const auto same = [](const StateTensor& a, const StateTensor& b) {
    return a.name == b.name && a.type == b.type && a.rows == b.rows && a.columns == b.columns;
  };
  if (!head_.ended_.ok()) return head_.ended_;
  if (!head_.draining_.ok()) return head_.draining_;
  if (head_.window_.state == WindowState::kFreezing || head_.window_work_ > 0) {
    return refuse("a call that ends its window is under way; try again");
  }
  if (checkpoint.weight_version == 0 && head_.weight_version_ > 0) {
    return refuse("it is of a time without weights");
  }
  const std::vector<StateTensor> tensors = head_.backend_->StateTensors();
  if (checkpoint.weight_version > 0 && !std::equal(tensors.begin(), tensors.end(), checkpoint.tensors.begin(),
                                                   checkpoint.tensors.end(), same)) {
    return refuse("it has other tensors than the head has here");
  }
  int64_t needed = 0;
  const DeterministicTiles tiles(head_.environment_.limits, head_.config_.hidden_size);
  for (const SessionCheckpoint& session : checkpoint.sessions) {
    if (!session.tiles.has_value()) continue;
    ++needed;
    if (absl::Status right = tiles.CheckContent(*session.tiles); !right.ok()) return right;
  }
  if (needed <= static_cast<int64_t>(head_.deterministic_.size()) + more_memory) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
      absl::StrCat("the checkpoint cannot be restored to head ", head_.config_.name,
                   ": a deterministic session whose memory it needs was closed a moment ago; try again"));
}

absl::Status HeadCheckpointer::RestoreTensors(const StateSource& source) {
  for (const StateTensor& tensor : source.checkpoint().tensors) {
    const int64_t row_bytes = tensor.columns * kernels::SizeOf(tensor.type);
    std::vector<std::byte> piece(PieceRows(tensor.rows, row_bytes) * static_cast<size_t>(row_bytes));
    absl::Status status = ForPieces(tensor.rows, row_bytes, [&](int64_t first, int64_t count) {
      const std::span<std::byte> rows = std::span(piece).first(static_cast<size_t>(count * row_bytes));
      absl::Status read = source.Read(TensorFile(tensor.name), first * row_bytes, rows);
      return read.ok() ? OfDevice(head_.backend_->WriteState(tensor.name, first, count, rows.data())) : read;
    });
    if (!status.ok()) return status;
  }
  return source.checkpoint().tensors.empty() ? absl::OkStatus() : OfDevice(head_.backend_->RestoreState());
}

absl::Status HeadCheckpointer::OfDevice(absl::Status status) {
  device_.Update(status);
  return status;
}

absl::Status HeadCheckpointer::RestoreGradient(const StateSource& source, const std::string& name,
                                               Gradient* gradient) {
  const std::vector<std::string>& there = source.checkpoint().gradients;
  if (std::find(there.begin(), there.end(), name) == there.end()) {
    head_.backend_->Reset(gradient);
    return absl::OkStatus();
  }
  const int64_t row_bytes = head_.config_.hidden_size * static_cast<int64_t>(sizeof(float));
  const size_t most = PieceRows(head_.config_.vocab_size, row_bytes);
  std::vector<float> piece(most * static_cast<size_t>(head_.config_.hidden_size));
  std::vector<float> bias(head_.config_.bias ? most : 0);
  return ForPieces(head_.config_.vocab_size, row_bytes, [&](int64_t first, int64_t count) {
    const auto part = [count](std::vector<float>& values, int64_t columns) {
      return std::as_writable_bytes(std::span(values).first(static_cast<size_t>(count * columns)));
    };
    absl::Status read = source.Read(name, first * row_bytes, part(piece, head_.config_.hidden_size));
    if (read.ok() && head_.config_.bias) {
      read = source.Read(BiasOf(name), first * static_cast<int64_t>(sizeof(float)), part(bias, 1));
    }
    if (!read.ok()) return read;
    return OfDevice(head_.backend_->WriteGradient(gradient, first, count, piece.data(),
                                                  head_.config_.bias ? bias.data() : nullptr));
  });
}

absl::Status HeadCheckpointer::RestoreWindowGradients(Head::RestoreAs as, const StateSource& source) {
  if (head_.frozen()) return absl::OkStatus();
  absl::Status status = RestoreGradient(source, kOwnGradient, nullptr);
  if (!status.ok() || head_.second_gradient_ == nullptr) return status;
  status = RestoreGradient(source, kNextGradient, head_.second_gradient_.get());
  if (!status.ok() || !Reopens(as, source.checkpoint())) return status;
  return OfDevice(head_.backend_->Fold(head_.second_gradient_.get(), nullptr));
}

// Nobody is left who could end the flush that held it: the window is whole again, as after an abort.
bool HeadCheckpointer::Reopens(Head::RestoreAs as, const HeadCheckpoint& checkpoint) {
  return as == Head::RestoreAs::kTagged && checkpoint.window.state == WindowState::kFrozen;
}

// Deterministic sessions get of `memory` what they need.
absl::Status HeadCheckpointer::RestoreSessions(const StateSource& source, std::vector<SessionMemory> memory,
                                               RestoredSessions* sessions) {
  for (const SessionCheckpoint& entry : source.checkpoint().sessions) {
    if (!entry.tiles.has_value()) continue;
    // BeginRestore has counted them.
    if (memory.empty()) return absl::InternalError("there is no memory for a deterministic session");
    SessionMemory own = std::move(memory.back());
    memory.pop_back();
    Gradient* const gradient = own.gradient.get();
    const uint64_t number = entry.session.number;
    if (absl::Status status = RestoreGradient(source, SessionGradient(number), gradient); !status.ok()) {
      return status;
    }
    const MemoryPlan plan = own.reservation->plan();
    auto session = std::make_shared<DeterministicSession>(
        DeterministicSession{std::move(own), plan, entry.id, entry.session.rank, number,
                             DeterministicTiles(head_.environment_.limits, head_.config_.hidden_size)});
    session->tiles.Restore(*entry.tiles, [this, gradient](const Chunk& chunk) {
      return Head::TileKind(KindOf(chunk, head_.config_), gradient);
    });
    sessions->emplace(entry.id, std::move(session));
  }
  for (SessionMemory& unused : memory) Drop(unused);
  return absl::OkStatus();
}

// All at once, as every other thread sees it.
void HeadCheckpointer::TakeOver(Head::RestoreAs as, const RestoreNumbers& numbers,
                                const HeadCheckpoint& checkpoint, RestoredSessions sessions) {
  std::vector<std::shared_ptr<LaneListener>> listeners;
  absl::Status restored;
  UndoneWrite undone;
  // The next write's buffer comes after this one's has gone: the reservation covers one.
  std::unique_lock making(head_.begin_write_mutex_);
  {
    const std::lock_guard lock(head_.mutex_);
    if (as == Head::RestoreAs::kTagged) undone = UndoWritesLocked();
    uint64_t version = checkpoint.weight_version;
    // One may have been published since the numbers were given.
    if (as == Head::RestoreAs::kTagged && version > 0) {
      version = std::max(numbers.weight_version, head_.weight_version_ + 1);
    }
    head_.restores_ = as == Head::RestoreAs::kDrained ? checkpoint.restores : numbers.restores;
    for (const auto& [key, runtime] : head_.lanes_) head_.WithdrawLocked(key);
    for (auto& [key, runtime] : head_.lanes_) listeners.push_back(std::move(runtime.listener));
    head_.lanes_.clear();  // a later stream of the same lane has another epoch
    std::map<std::string, AccumulationLedger::Session, std::less<>> ledger;
    for (const SessionCheckpoint& entry : checkpoint.sessions) {
      ledger.emplace(entry.id, entry.session).first->second.last_active = MonotonicNow();
    }
    head_.window_ = checkpoint.window;
    head_.window_.flush_begun = absl::Now();
    head_.window_.flush_frozen = head_.window_.flush_begun;
    if (head_.window_.tokens > 0) head_.window_.since = head_.window_.flush_begun;
    if (head_.window_.next_tokens > 0) head_.window_.next_since = head_.window_.flush_begun;
    if (Reopens(as, checkpoint)) {
      head_.window_.state = WindowState::kOpen;
      head_.window_.TakeBackNext();
    }
    head_.window_gradient_ = nullptr;
    head_.ledger_.Replace(std::move(ledger), checkpoint.last_session_number,
                          head_.window_.state == WindowState::kFrozen
                              ? AccumulationLedger::WindowPhase::kFrozen
                              : AccumulationLedger::WindowPhase::kOpen);
    head_.deterministic_ = std::move(sessions);
    head_.optimizer_steps_ = checkpoint.optimizer_steps;
    head_.last_committed_write_ = as == Head::RestoreAs::kDrained ? checkpoint.last_committed_write : "";
    head_.last_committed_version_ = checkpoint.last_committed_version;
    StepResult& step = head_.window_.last_step.result;
    if (step.weight_version == checkpoint.weight_version) step.weight_version = version;
    head_.weight_version_ = version;
    head_.restoring_ = absl::OkStatus();
    restored =
        MakeError(absl::StatusCode::kUnavailable, RejectReason::kCheckpoint, "head",
                  absl::StrCat("head ", head_.config_.name, " was restored from a checkpoint of generation ",
                               head_.window_.generation, "; open the session again"));
  }
  if (undone.staged != nullptr) undone.staged->Take();
  making.unlock();
  for (const auto& waiter : undone.waiters) waiter(undone.status);
  for (const auto& listener : listeners) {
    if (listener != nullptr) listener->OnEnd(restored);
  }
}

// A write that began before must not put weights of a later time over those of the checkpoint, whether its
// commit is still to come or only waits for its turn.
HeadCheckpointer::UndoneWrite HeadCheckpointer::UndoWritesLocked() {
  UndoneWrite undone;
  head_.NoteUndoneLocked(head_.last_committed_write_);
  undone.staged = std::exchange(head_.staged_, nullptr);
  if (undone.staged == nullptr) return undone;
  head_.NoteUndoneLocked(undone.staged->id());
  undone.status = head_.NoWriteLocked(undone.staged->id());
  undone.waiters = std::exchange(head_.publish_waiters_, {});
  head_.publishing_ = false;
  return undone;
}

// The device has a part of the checkpoint, and the disk does not give the rest.
void HeadCheckpointer::EndInPieces(const absl::Status& status) {
  {
    const std::lock_guard lock(head_.mutex_);
    head_.ended_ = Refused(absl::StatusCode::kDataLoss,
                           absl::StrCat("a restore of head ", head_.config_.name, " broke off (",
                                        status.message(), "): delete the head and restore it again"));
  }
  head_.EndStreams();
}

}  // namespace lossd::engine
