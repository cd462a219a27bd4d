// What a head does to be saved and restored: its friend, for one call on its device thread.
#ifndef LOSSD_SERVER_ENGINE_HEAD_HEAD_CHECKPOINTER_H_
#define LOSSD_SERVER_ENGINE_HEAD_HEAD_CHECKPOINTER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/head/head.h"
#include "server/engine/head/head_state.h"

namespace lossd::engine {

class HeadCheckpointer {
 public:
  explicit HeadCheckpointer(Head* head) : head_(*head) {}

  // As Head::Save and Head::Restore. Nothing is saved, and none returned, while the gradients are not yet
  // what the window says: to be called again behind the work that was posted for it.
  std::optional<absl::StatusOr<HeadCheckpoint>> Save(Head::SaveAs as, StateSink* sink);
  absl::StatusOr<FileKeys> Restore(Head::RestoreAs as, const RestoreNumbers& numbers,
                                   const StateSource& source, std::vector<SessionMemory> memory);

 private:
  using GradientFiles = std::vector<std::pair<std::string, const Gradient*>>;
  using RestoredSessions = std::map<std::string, std::shared_ptr<DeterministicSession>>;
  // The staged write that a restore drops, and those who wait for its publishing, to be told `status`.
  struct UndoneWrite {
    std::shared_ptr<StagedWrite> staged;  // null: there was none
    std::vector<Head::CommitCallback> waiters;
    absl::Status status;
  };

  absl::Status DescribeLocked(Head::SaveAs as, HeadCheckpoint* checkpoint, GradientFiles* gradients) const;
  absl::Status DescribeSessionLocked(SessionCheckpoint* entry) const;
  void NameGradientsLocked(const HeadCheckpoint& checkpoint, GradientFiles* gradients) const;
  std::string KeyOf(const StateTensor& tensor) const;
  std::string KeyOfGradients() const;
  absl::Status SaveTensor(const StateTensor& tensor, StateSink* sink, absl::Status* device);
  absl::Status SaveGradient(const std::string& name, const Gradient* gradient, StateSink* sink,
                            absl::Status* device);

  // From now on no window ends, until the checkpoint has taken the place of everything, and `memory` has also
  // what deterministic sessions had.
  absl::Status BeginRestore(const HeadCheckpoint& checkpoint, std::vector<SessionMemory>* memory);
  absl::Status CheckRestorableLocked(const HeadCheckpoint& checkpoint, int64_t more_memory) const;
  absl::Status RestoreTensors(const StateSource& source);
  absl::Status RestoreGradient(const StateSource& source, const std::string& name, Gradient* gradient);
  absl::Status RestoreWindowGradients(Head::RestoreAs as, const StateSource& source);
  static bool Reopens(Head::RestoreAs as, const HeadCheckpoint& checkpoint);
  absl::Status RestoreSessions(const StateSource& source, std::vector<SessionMemory> memory,
                               RestoredSessions* sessions);
  void TakeOver(Head::RestoreAs as, const RestoreNumbers& numbers, const HeadCheckpoint& checkpoint,
                RestoredSessions sessions);
  UndoneWrite UndoWritesLocked();
  void EndInPieces(const absl::Status& status);
  // What the device says to a restore, remembered.
  absl::Status OfDevice(absl::Status status);

  Head& head_;
  absl::Status device_;  // its first error
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_HEAD_CHECKPOINTER_H_
