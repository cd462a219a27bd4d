#include "server/engine/replicas/joint_checkpoint.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <future>
#include <span>
#include <string>
#include <utility>

#include "kernels/slices.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/head/replica/joint_rows.h"
#include "server/engine/replicas/joint_state.h"
#include "server/engine/replicas/part_answers.h"

namespace lossd::engine {
namespace {

using kernels::RowSpan;
using kernels::SliceLayout;

// Pieces of rows that are on their way at once, so that neither the disk nor the network waits.
constexpr size_t kPiecesUnderWay = 4;

// The coordinator's own replica.
class OwnCheckpointPart : public CheckpointPart {
 public:
  OwnCheckpointPart(std::shared_ptr<Head> head, std::shared_ptr<const ReplicaCommunicators> replicas,
                    std::shared_ptr<const StateSource> source)
      : head_(std::move(head)), replicas_(std::move(replicas)), source_(std::move(source)) {}

  void Capture(const WindowPlace& place, const std::vector<SessionMarks>& named,
               std::function<void(absl::StatusOr<HeadCheckpoint>)> done) override {
    head_->CapturePart(place, named, std::move(done));
  }
  void SumCaptured(Done done) override { head_->SumCapturedPart(replicas_, std::move(done)); }
  void Release(Done done) override {
    head_->ReleaseCaptured();
    done(absl::OkStatus());
  }
  void ReadRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) override {
    head_->ReadPartRows(rows, std::move(done));
  }
  void BeginRestore(std::function<void(absl::StatusOr<RestoringPart>)> done) override {
    head_->BeginRestorePart(std::move(done));
  }
  void WriteRows(const PartRows& rows, std::string bytes, Done done) override {
    head_->WritePartRows(rows, std::move(bytes), std::move(done));
  }
  void FinishRestore(const RestoredPart& part, Done done) override {
    head_->FinishRestorePart(part, source_, replicas_, std::move(done));
  }
  void CancelRestore(Done done) override {
    head_->CancelRestorePart();
    done(absl::OkStatus());
  }
  // Comes last, when all others have: RestoreTogether.
  void InstallRestored(Done done) override { done(absl::OkStatus()); }

 private:
  const std::shared_ptr<Head> head_;
  const std::shared_ptr<const ReplicaCommunicators> replicas_;
  const std::shared_ptr<const StateSource> source_;  // null where nothing is restored
};

// Rows of one slice, and who has them.
struct Piece {
  RowSpan rows;
  int32_t owner = 0;
  int32_t mirror = 0;
};

// All replicas of a head, asked one thing after the other by a thread that waits.
class AllParts {
 public:
  AllParts(const Head& head, const CheckpointReplicas& replicas, std::shared_ptr<CheckpointPart> own)
      : replicas_(replicas), slices_(head.SliceRows()) {
    parts_.push_back(std::move(own));
    parts_.insert(parts_.end(), replicas.others.begin(), replicas.others.end());
  }

  int32_t size() const { return static_cast<int32_t>(parts_.size()); }
  CheckpointPart& at(int32_t replica) { return *parts_[static_cast<size_t>(replica)]; }

  // ask(part, its number, what it answers to).
  template <class Answer, class Ask>
  absl::StatusOr<std::vector<Answer>> AskAll(Ask ask) {
    std::vector<std::future<Answer>> asked;
    const bool current = replicas_.epoch->Ask([&] {
      for (size_t i = 0; i < parts_.size(); ++i) {
        const auto answer = std::make_shared<std::promise<Answer>>();
        asked.push_back(answer->get_future());
        ask(*parts_[i], i, [answer](Answer given) { answer->set_value(std::move(given)); });
      }
    });
    if (!current) return ReplicaLost("a replica was lost");
    std::vector<Answer> answers;
    for (std::future<Answer>& answer : asked) answers.push_back(answer.get());
    if (absl::Status error = FirstError(answers); !error.ok()) return error;
    return answers;
  }
  // In what all exchange, an error ends the epoch at once, for the others wait for this one at their devices.
  template <class Ask>
  absl::Status Exchange(Ask ask) {
    const absl::Status all =
        AskAll<absl::Status>([&](CheckpointPart& part, size_t i, CheckpointPart::Done done) {
          ask(part, i, [broken = replicas_.on_broken, done = std::move(done)](const absl::Status& status) {
            if (!status.ok()) broken(status);
            done(status);
          });
        }).status();
    // Who is told so by its device may be heard sooner than the loss.
    return absl::IsUnavailable(all) ? ReplicaLost(all.message()) : all;
  }
  template <class Ask>
  absl::Status TellAll(Ask ask) {
    return AskAll<absl::Status>([&](CheckpointPart& part, size_t /*i*/, CheckpointPart::Done done) {
             ask(part, std::move(done));
           })
        .status();
  }

  // All rows, in order.
  std::vector<Piece> PiecesOf(int64_t row_bytes) const {
    const int64_t most = RowsOfPiece(row_bytes);
    const SliceLayout layout(0, size());
    std::vector<Piece> pieces;
    for (size_t slice = 0; slice < slices_.size(); ++slice) {
      const auto owner = static_cast<int32_t>(slice);
      for (const RowSpan& rows : slices_[slice]) {
        for (int64_t first = rows.first; first < rows.end(); first += most) {
          pieces.push_back({{first, std::min(most, rows.end() - first)}, owner, layout.MirrorOf(owner)});
        }
      }
    }
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.rows.first < b.rows.first; });
    return pieces;
  }

 private:
  const CheckpointReplicas& replicas_;
  const std::vector<std::vector<RowSpan>> slices_;
  std::vector<std::shared_ptr<CheckpointPart>> parts_;
};

// Saving

class JointSave {
 public:
  JointSave(const std::shared_ptr<Head>& head, const CheckpointReplicas& replicas, StateSink* sink)
      : head_(*head),
        parts_(*head, replicas, std::make_shared<OwnCheckpointPart>(head, replicas.own, nullptr)),
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
    const bool here = IsWhole(tensor) || piece.mirror == ReplicaPlace::kCoordinator;
    return here ? ReplicaPlace::kCoordinator : piece.owner;
  }

  Head& head_;
  AllParts parts_;
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
  auto captured = parts_.AskAll<absl::StatusOr<HeadCheckpoint>>(
      [&](CheckpointPart& part, size_t /*i*/, std::function<void(absl::StatusOr<HeadCheckpoint>)> done) {
        part.Capture(place, named, std::move(done));
      });
  const auto release = [](CheckpointPart& part, CheckpointPart::Done done) { part.Release(std::move(done)); };
  if (!captured.ok()) {
    parts_.TellAll(release).IgnoreError();
    return captured.status();
  }
  std::vector<HeadCheckpoint> parts;
  for (absl::StatusOr<HeadCheckpoint>& part : *captured) parts.push_back(*std::move(part));
  HeadCheckpoint state = MergeParts(std::move(parts));
  const absl::Status summed =
      state.gradients.empty()
          ? parts_.TellAll(release)
          : parts_.Exchange([](CheckpointPart& part, size_t /*i*/, CheckpointPart::Done done) {
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
  const std::vector<Piece> pieces = parts_.PiecesOf(row_bytes);
  std::deque<Answered> asked;
  for (size_t i = 0; i < pieces.size(); ++i) {
    while (asked.size() < kPiecesUnderWay && i + asked.size() < pieces.size()) {
      asked.push_back(Read(tensor, pieces[i + asked.size()]));
    }
    const absl::StatusOr<std::string> bytes = asked.front().get();
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
  JointRestore(const std::shared_ptr<Head>& head, const CheckpointReplicas& replicas,
               const std::shared_ptr<const StateSource>& source)
      : head_(*head),
        replicas_(replicas),
        parts_(*head, replicas, std::make_shared<OwnCheckpointPart>(head, replicas.own, source)),
        source_(*source) {}

  absl::Status Restore(RestoreNumbers numbers);

 private:
  absl::Status RestoreAll(RestoreNumbers numbers);
  absl::Status WriteTensor(const StateTensor& tensor);
  // To all replicas that have these rows.
  void Write(const std::string& tensor, const Piece& piece, const std::string& bytes,
             std::deque<std::future<absl::Status>>* asked);

  Head& head_;
  const CheckpointReplicas& replicas_;
  AllParts parts_;
  const StateSource& source_;
};

absl::Status JointRestore::Restore(RestoreNumbers numbers) {
  if (absl::Status may = head_.CheckRestorable(source_.checkpoint()); !may.ok()) return may;
  absl::Status restored = RestoreAll(numbers);
  // Where nothing is overwritten the head goes on. If one was lost, the next epoch says what it does.
  if (!restored.ok() && !IsReplicaLost(restored)) {
    parts_
        .TellAll([](CheckpointPart& part, CheckpointPart::Done done) { part.CancelRestore(std::move(done)); })
        .IgnoreError();
  }
  return restored;
}

absl::Status JointRestore::RestoreAll(RestoreNumbers numbers) {
  const HeadCheckpoint& state = source_.checkpoint();
  const auto begun = parts_.AskAll<absl::StatusOr<RestoringPart>>(
      [](CheckpointPart& part, size_t /*i*/, std::function<void(absl::StatusOr<RestoringPart>)> done) {
        part.BeginRestore(std::move(done));
      });
  if (!begun.ok()) return begun.status();
  std::vector<RestoringPart> replicas;
  for (const absl::StatusOr<RestoringPart>& part : *begun) {
    // One version everywhere, which no weights had before.
    numbers.weight_version = std::max(numbers.weight_version, part->weight_version + 1);
    replicas.push_back(*part);
  }
  for (const StateTensor& tensor : state.tensors) {
    if (absl::Status written = WriteTensor(tensor); !written.ok()) return written;
  }
  const std::vector<RestoredPart> restored = SplitCheckpoint(state, numbers, replicas);
  const absl::Status finished =
      parts_.Exchange([&](CheckpointPart& part, size_t i, CheckpointPart::Done done) {
        part.FinishRestore(restored[i], std::move(done));
      });
  if (!finished.ok()) return finished;
  const absl::Status installed =
      parts_.Exchange([](CheckpointPart& part, size_t /*i*/, CheckpointPart::Done done) {
        part.InstallRestored(std::move(done));
      });
  if (!installed.ok()) return installed;
  const bool all = replicas_.epoch->Finish([this] { head_.InstallRestoredPart(); });
  return all ? absl::OkStatus() : ReplicaLost("a replica was lost");
}

void JointRestore::Write(const std::string& tensor, const Piece& piece, const std::string& bytes,
                         std::deque<std::future<absl::Status>>* asked) {
  // Others gather what they do not step, but of a head that nothing steps.
  const bool all = head_.config().weight_gradients == WeightGradients::kFrozen;
  for (int32_t replica = 0; replica < parts_.size(); ++replica) {
    if (!all && replica != piece.owner && replica != piece.mirror) continue;
    const auto answer = std::make_shared<std::promise<absl::Status>>();
    asked->push_back(answer->get_future());
    parts_.at(replica).WriteRows({tensor, piece.rows}, bytes,
                                 [answer](const absl::Status& written) { answer->set_value(written); });
  }
}

absl::Status JointRestore::WriteTensor(const StateTensor& tensor) {
  const int64_t row_bytes = tensor.columns * kernels::SizeOf(tensor.type);
  std::deque<std::future<absl::Status>> asked;
  absl::Status status;
  const auto await_all_but = [&](size_t most) {
    while (asked.size() > most) {
      status.Update(asked.front().get());
      asked.pop_front();
    }
  };
  for (const Piece& piece : parts_.PiecesOf(row_bytes)) {
    std::string bytes(static_cast<size_t>(piece.rows.count * row_bytes), '\0');
    status.Update(source_.Read(TensorFile(tensor.name), piece.rows.first * row_bytes,
                               std::as_writable_bytes(std::span(bytes))));
    if (!status.ok()) break;
    Write(tensor.name, piece, bytes, &asked);
    await_all_but(2 * kPiecesUnderWay);
  }
  await_all_but(0);
  return status;
}

}  // namespace

absl::StatusOr<HeadCheckpoint> SaveTogether(const std::shared_ptr<Head>& head,
                                            const CheckpointReplicas& replicas,
                                            const std::vector<SessionMarks>& named, StateSink* sink) {
  const absl::StatusOr<Head::BegunSave> begun = head->BeginSave();
  if (!begun.ok()) return begun.status();
  absl::StatusOr<HeadCheckpoint> saved = JointSave(head, replicas, sink).Save(*begun, named);
  head->EndSave();
  return saved;
}

absl::Status RestoreTogether(const std::shared_ptr<Head>& head, const CheckpointReplicas& replicas,
                             RestoreNumbers numbers, const std::shared_ptr<const StateSource>& source) {
  return JointRestore(head, replicas, source).Restore(numbers);
}

}  // namespace lossd::engine
