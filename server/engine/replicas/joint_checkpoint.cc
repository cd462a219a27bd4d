#include "server/engine/replicas/joint_checkpoint.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/slices.h"
#include "server/engine/common/awaiting.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/head/replica/joint_rows.h"
#include "server/engine/replicas/all_parts.h"
#include "server/engine/replicas/joint_state.h"
#include "server/engine/replicas/own_part.h"

namespace lossd::engine {
namespace {

using kernels::RowSpan;

// Pieces of rows that are on their way at once, so that neither the disk nor the network waits.
constexpr int kPiecesUnderWay = 4;
constexpr size_t kWritesUnderWay = 8;  // to all replicas

// Rows of one slice, and the replica that steps them.
struct Piece {
  RowSpan rows;
  int32_t owner = 0;
};

// All rows, in order.
std::vector<Piece> PiecesOf(const Head& head, int64_t row_bytes) {
  const int64_t most = RowsOfPiece(row_bytes);
  const std::vector<std::vector<RowSpan>> slices = head.SliceRows();
  std::vector<Piece> pieces;
  for (size_t slice = 0; slice < slices.size(); ++slice) {
    for (const RowSpan& rows : slices[slice]) {
      for (int64_t first = rows.first; first < rows.end(); first += most) {
        pieces.push_back({{first, std::min(most, rows.end() - first)}, static_cast<int32_t>(slice)});
      }
    }
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.rows.first < b.rows.first; });
  return pieces;
}

// Saving

// Whether deterministic sessions have added to the window.
bool HasTiles(const HeadCheckpoint& part) {
  return std::any_of(part.sessions.begin(), part.sessions.end(), [](const SessionCheckpoint& entry) {
    return entry.tiles.has_value() && !entry.tiles->taken.empty();
  });
}

class JointSave {
 public:
  JointSave(const std::shared_ptr<Head>& head, const JointReplicas& replicas, SavedWindow window,
            StateSink* sink)
      : head_(*head),
        parts_(replicas, std::make_shared<OwnPart>(head, replicas.own)),
        window_(window),
        sink_(*sink) {}

  absl::StatusOr<HeadCheckpoint> Save(const Head::BegunSave& begun, const std::vector<SessionMarks>& named);

 private:
  using Answered = std::future<absl::StatusOr<std::string>>;

  // What all of them are. The sum of their gradients is then there, if it says so.
  absl::StatusOr<HeadCheckpoint> Capture(const WindowPlace& place, const std::vector<SessionMarks>& named);
  absl::Status WriteTensor(const StateTensor& tensor, const StateKeys& keys);
  absl::Status WriteSum();
  // Calls take(rows, bytes) for all rows of a tensor, or of the sum.
  absl::Status ReadAll(
      const std::string& tensor, int64_t row_bytes,
      const std::function<absl::Status(const RowSpan& rows, const std::string& bytes)>& take);
  Answered Read(const std::string& tensor, const Piece& piece);
  // Tensors that batches use are at every replica, whole.
  static int32_t HolderOf(const std::string& tensor, const Piece& piece) {
    return IsWhole(tensor) ? ReplicaPlace::kCoordinator : piece.owner;
  }

  Head& head_;
  AllParts parts_;
  const SavedWindow window_;
  StateSink& sink_;
};

absl::StatusOr<HeadCheckpoint> JointSave::Save(const Head::BegunSave& begun,
                                               const std::vector<SessionMarks>& named) {
  absl::StatusOr<HeadCheckpoint> state = Capture(begun.place, named);
  if (!state.ok()) return state;
  if (state->weight_version > 0) state->tensors = StateTensorsOf(head_.config());
  absl::Status written;
  for (const StateTensor& tensor : state->tensors) {
    if (written.ok()) written = WriteTensor(tensor, begun.keys);
  }
  if (written.ok() && !state->gradients.empty()) written = WriteSum();
  if (!written.ok()) return written;
  return state;
}

absl::StatusOr<HeadCheckpoint> JointSave::Capture(const WindowPlace& place,
                                                  const std::vector<SessionMarks>& named) {
  auto captured = parts_.AskAll<HeadCheckpoint>(
      std::nullopt,
      [&](ReplicaPart& part, size_t /*i*/, std::function<void(absl::StatusOr<HeadCheckpoint>)> done) {
        part.Capture(place, named, std::move(done));
      });
  const auto release = [this] {
    return parts_.TellAll(std::nullopt, [](ReplicaPart& part, size_t /*i*/, ReplicaPart::Done done) {
      part.Release(std::move(done));
    });
  };
  if (!captured.ok()) {
    release().IgnoreError();
    return captured.status();
  }
  const bool in_order = std::any_of(captured->begin(), captured->end(), HasTiles);
  if (in_order && window_ == SavedWindow::kAsItIs) {
    release().IgnoreError();
    return absl::FailedPreconditionError(
        absl::StrCat("head ", head_.config().name,
                     " is over replicas, and deterministic sessions have added to its window: save it when "
                     "the window has ended, by a step or a flush"));
  }
  if (in_order || window_ == SavedWindow::kAsItBegan) {
    for (HeadCheckpoint& part : *captured) GoBackToWindowBegin(&part);
  }
  HeadCheckpoint state = MergeParts(*std::move(captured));
  const absl::Status summed =
      state.gradients.empty()
          ? release()
          : parts_.DoTogether(std::nullopt, [](ReplicaPart& part, size_t /*i*/, ReplicaPart::Done done) {
              part.SumCaptured(std::move(done));
            });
  if (!summed.ok()) return summed;
  return state;
}

JointSave::Answered JointSave::Read(const std::string& tensor, const Piece& piece) {
  const auto answer = std::make_shared<std::promise<absl::StatusOr<std::string>>>();
  parts_.at(HolderOf(tensor, piece))
      .ReadRows({tensor, piece.rows},
                [answer](absl::StatusOr<std::string> bytes) { answer->set_value(std::move(bytes)); });
  return answer->get_future();
}

absl::Status JointSave::ReadAll(
    const std::string& tensor, int64_t row_bytes,
    const std::function<absl::Status(const RowSpan& rows, const std::string& bytes)>& take) {
  const std::vector<Piece> pieces = PiecesOf(head_, row_bytes);
  // One whose device has failed, say, has no rows, and what was saved of it would be empty.
  if (pieces.empty() && head_.config().vocab_size > 0) {
    return absl::UnavailableError(
        absl::StrCat("head ", head_.config().name, " has ended while it was saved"));
  }
  std::deque<Answered> asked;
  for (size_t i = 0; i < pieces.size(); ++i) {
    while (std::ssize(asked) < kPiecesUnderWay && i + asked.size() < pieces.size()) {
      asked.push_back(Read(tensor, pieces[i + asked.size()]));
    }
    const absl::StatusOr<std::string> bytes = Await(asked.front());
    asked.pop_front();
    if (!bytes.ok()) return bytes.status();
    absl::Status size = CheckSize(HolderOf(tensor, pieces[i]), pieces[i].rows, row_bytes, *bytes);
    if (!size.ok()) return size;
    if (absl::Status taken = take(pieces[i].rows, *bytes); !taken.ok()) return taken;
  }
  return absl::OkStatus();
}

absl::Status JointSave::WriteTensor(const StateTensor& tensor, const StateKeys& keys) {
  return sink_.Add(TensorFile(tensor.name), KeyOf(keys, tensor), [&](const StateSink::Append& append) {
    return ReadAll(tensor.name, tensor.columns * kernels::SizeOf(tensor.type),
                   [&](const RowSpan& /*rows*/, const std::string& bytes) {
                     return append(std::as_bytes(std::span(bytes)));
                   });
  });
}

// The sum of the bias comes with that of the matrix, and goes to a file of its own.
absl::Status JointSave::WriteSum() {
  const HeadConfig& config = head_.config();
  std::string biases;
  const int64_t matrix_row = config.hidden_size * static_cast<int64_t>(sizeof(float));
  const int64_t bias_row = config.bias ? static_cast<int64_t>(sizeof(float)) : 0;
  absl::Status written = sink_.Add(kOwnGradient, "", [&](const StateSink::Append& append) {
    return ReadAll("", matrix_row + bias_row, [&](const RowSpan& rows, const std::string& bytes) {
      const auto matrix = static_cast<size_t>(rows.count * matrix_row);
      biases.append(bytes, matrix);
      return append(std::as_bytes(std::span(bytes)).first(matrix));
    });
  });
  if (!written.ok() || !config.bias) return written;
  return sink_.Add(BiasOf(kOwnGradient), "",
                   [&](const StateSink::Append& append) { return append(std::as_bytes(std::span(biases))); });
}

// Restoring

class JointRestore {
 public:
  JointRestore(const std::shared_ptr<Head>& head, const JointReplicas& replicas,
               const std::shared_ptr<const StateSource>& source)
      : head_(*head),
        parts_(replicas, std::make_shared<OwnPart>(head, replicas.own, source)),
        source_(*source) {}

  absl::StatusOr<FileKeys> Restore(RestoreNumbers numbers);

 private:
  absl::StatusOr<FileKeys> RestoreAll(RestoreNumbers numbers);
  absl::Status WriteTensor(const StateTensor& tensor);
  std::future<absl::StatusOr<std::string>> Read(const std::string& tensor, const Piece& piece,
                                                int64_t row_bytes);
  // To the replica that steps these rows.
  void Write(const std::string& tensor, const Piece& piece, std::string bytes,
             std::deque<std::future<absl::Status>>* asked);

  Head& head_;
  AllParts parts_;
  const StateSource& source_;
  WorkerPool readers_{kPiecesUnderWay};
};

absl::StatusOr<FileKeys> JointRestore::Restore(RestoreNumbers numbers) {
  if (absl::Status may = head_.CheckRestorable(source_.checkpoint()); !may.ok()) return may;
  absl::StatusOr<FileKeys> restored = RestoreAll(numbers);
  // Where nothing is overwritten the head goes on. If one was lost, the next epoch says what it does.
  if (!restored.ok() && !IsReplicaLost(restored.status())) {
    parts_
        .TellAll(std::nullopt, [](ReplicaPart& part, size_t /*i*/,
                                  ReplicaPart::Done done) { part.CancelRestore(std::move(done)); })
        .IgnoreError();
  }
  return restored;
}

absl::StatusOr<FileKeys> JointRestore::RestoreAll(RestoreNumbers numbers) {
  const HeadCheckpoint& state = source_.checkpoint();
  const auto begun = parts_.AskAll<RestoringPart>(
      std::nullopt,
      [](ReplicaPart& part, size_t /*i*/, std::function<void(absl::StatusOr<RestoringPart>)> done) {
        part.BeginRestore(std::move(done));
      });
  if (!begun.ok()) return begun.status();
  for (const RestoringPart& part : *begun) {
    // One version everywhere, which no weights had before.
    numbers.weight_version = std::max(numbers.weight_version, part.weight_version + 1);
  }
  for (const StateTensor& tensor : state.tensors) {
    if (absl::Status written = WriteTensor(tensor); !written.ok()) return written;
  }
  const std::vector<RestoredPart> restored = SplitCheckpoint(state, numbers, *begun);
  absl::Status done =
      parts_.DoTogether(std::nullopt, [&](ReplicaPart& part, size_t i, ReplicaPart::Done finished) {
        part.FinishRestore(restored[i], std::move(finished));
      });
  if (!done.ok()) return done;
  done = parts_.DoTogether(std::nullopt, [](ReplicaPart& part, size_t /*i*/, ReplicaPart::Done installed) {
    part.InstallRestored(std::move(installed));
  });
  if (!done.ok()) return done;
  return head_.InstallRestoredPart();
}

std::future<absl::StatusOr<std::string>> JointRestore::Read(const std::string& tensor, const Piece& piece,
                                                            int64_t row_bytes) {
  const auto answer = std::make_shared<std::promise<absl::StatusOr<std::string>>>();
  readers_.Run([this, file = TensorFile(tensor), rows = piece.rows, row_bytes, answer] {
    std::string bytes(static_cast<size_t>(rows.count * row_bytes), '\0');
    const absl::Status read =
        source_.Read(file, rows.first * row_bytes, std::as_writable_bytes(std::span(bytes)));
    answer->set_value(read.ok() ? absl::StatusOr<std::string>(std::move(bytes)) : read);
  });
  return answer->get_future();
}

void JointRestore::Write(const std::string& tensor, const Piece& piece, std::string bytes,
                         std::deque<std::future<absl::Status>>* asked) {
  const auto write = [&](int32_t replica, std::string rows) {
    const auto answer = std::make_shared<std::promise<absl::Status>>();
    asked->push_back(answer->get_future());
    parts_.at(replica).WriteRows({tensor, piece.rows}, std::move(rows),
                                 [answer](const absl::Status& written) { answer->set_value(written); });
  };
  // Others gather what they do not step, but of a head that nothing steps.
  if (head_.config().weight_gradients != WeightGradients::kFrozen) {
    return write(piece.owner, std::move(bytes));
  }
  for (int32_t replica = 0; replica < parts_.size(); ++replica) write(replica, bytes);
}

absl::Status JointRestore::WriteTensor(const StateTensor& tensor) {
  const int64_t row_bytes = tensor.columns * kernels::SizeOf(tensor.type);
  std::deque<std::future<absl::Status>> asked;
  absl::Status status;
  const auto await_all_but = [&](size_t most) {
    while (asked.size() > most) {
      status.Update(Await(asked.front()));
      asked.pop_front();
    }
  };
  const std::vector<Piece> pieces = PiecesOf(head_, row_bytes);
  std::deque<std::future<absl::StatusOr<std::string>>> read;
  for (size_t i = 0; i < pieces.size() && status.ok(); ++i) {
    while (std::ssize(read) < kPiecesUnderWay && i + read.size() < pieces.size()) {
      read.push_back(Read(tensor.name, pieces[i + read.size()], row_bytes));
    }
    absl::StatusOr<std::string> bytes = read.front().get();
    read.pop_front();
    status.Update(bytes.status());
    if (status.ok()) Write(tensor.name, pieces[i], *std::move(bytes), &asked);
    await_all_but(kWritesUnderWay);
  }
  await_all_but(0);
  return status;
}

}  // namespace

absl::StatusOr<HeadCheckpoint> SaveTogether(const std::shared_ptr<Head>& head, const JointReplicas& replicas,
                                            const std::vector<SessionMarks>& named, SavedWindow window,
                                            StateSink* sink) {
  const absl::StatusOr<Head::BegunSave> begun = head->BeginSave();
  if (!begun.ok()) return begun.status();
  absl::StatusOr<HeadCheckpoint> saved = JointSave(head, replicas, window, sink).Save(*begun, named);
  head->EndSave();
  return saved;
}

absl::StatusOr<FileKeys> RestoreTogether(const std::shared_ptr<Head>& head, const JointReplicas& replicas,
                                         RestoreNumbers numbers,
                                         const std::shared_ptr<const StateSource>& source) {
  return JointRestore(head, replicas, source).Restore(numbers);
}

}  // namespace lossd::engine
