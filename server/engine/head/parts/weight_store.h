// The weights of a head as calls name them: their version, and the staged write that is to replace them. The
// tensors themselves belong to the backend.
//
// Thread-compatible: guarded by Head::mutex_. Whatever must not happen under that lock (freeing a buffer,
// calling back) is returned to the caller.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_WEIGHT_STORE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_WEIGHT_STORE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/head/parts/head_copy.h"
#include "server/engine/head/parts/staged_write.h"

namespace lossd::engine {

// Whether a write may drop another one that is under way.
enum class Replace { kYes, kNo };

class WeightStore {
 public:
  // `head`: its name, for messages.
  explicit WeightStore(std::string head) : head_(std::move(head)) {}

  // 0: there are none yet.
  uint64_t version() const { return version_; }
  int64_t optimizer_steps() const { return optimizer_steps_; }
  // FAILED_PRECONDITION, naming the field "head", while there are no weights.
  absl::Status CheckPresent() const;
  // The same, and if `version` is not 0 and the weights are of another one: older ones are not kept. Then
  // `field` is named.
  absl::Status CheckVersion(uint64_t version, absl::string_view field) const;
  // A step of the optimizer made new weights.
  void NoteStep();

  // The id of the write that has this key, or empty if a new one is to be made: then the one that is under
  // way, if any, is dropped first (Drop). FAILED_PRECONDITION if that may not be.
  absl::StatusOr<std::string> Admit(const std::string& write_key, Replace replace) const;
  void Stage(std::shared_ptr<StagedWrite> write) { staged_ = std::move(write); }
  // NOT_FOUND if there is no such write, ABORTED if a restore undid it.
  absl::StatusOr<std::shared_ptr<StagedWrite>> Find(const std::string& write_id) const;
  // Takes out the write that is under way, for the caller to free; null if there is none, or it is being
  // published, or `write_id` is set and it is another.
  std::shared_ptr<StagedWrite> Drop(const std::optional<std::string>& write_id = std::nullopt);
  // FAILED_PRECONDITION while a write is under way, which would replace what is made of the weights
  // meanwhile.
  absl::Status CheckNoWrite() const;
  // Rows of the write under way that have arrived.
  int64_t staged_rows() const { return staged_ == nullptr ? 0 : staged_->rows(); }

  // The outcome of a call that commits a write.
  struct Commit {
    // Set: the answer. Otherwise `done` was taken, and is called with the others by whoever publishes.
    std::optional<absl::StatusOr<uint64_t>> answer;
    std::shared_ptr<StagedWrite> to_publish;  // not null for the first of them: it has to be posted
  };
  Commit BeginCommit(const std::string& write_id, CommitCallback& done);
  // The id of the write that BeginCommit has begun with and EndCommit not ended; empty: there is none.
  std::string committing() const { return publishing_ ? staged_->id() : ""; }
  // Those who wait for it, who are told something else than how it ended.
  std::vector<CommitCallback> TakeWaiters() { return std::exchange(waiters_, {}); }
  // It is not published after all; its rows stay.
  void CancelCommit() { publishing_ = false; }
  // Whether this write still waits to be published: a restore may have come first.
  bool IsStaged(const std::shared_ptr<StagedWrite>& write) const { return staged_ == write; }
  // The version that the last write has made, if it has this id, which BeginCommit then answers as well; none
  // if others came behind it, or a restore.
  std::optional<uint64_t> VersionOf(const std::string& write_id) const;
  // New weights that came about on the device are a write of this id; their version.
  uint64_t NoteWrite(std::string write_id);
  // Ends what BeginCommit began: with `published` ok there is a new version, which is the answer. Returns
  // those who wait for it.
  std::vector<CommitCallback> EndCommit(const absl::Status& published, absl::StatusOr<uint64_t>* answer);

  // A write that began before a restore must not put weights of a later time over those of the checkpoint,
  // whether its commit is still to come or only waits for its turn.
  struct Undone {
    std::shared_ptr<StagedWrite> staged;  // to be freed; null: there was none
    std::vector<CommitCallback> waiters;  // to be told `status`
    absl::Status status;
  };
  Undone UndoWrites();

  // The part that a checkpoint keeps.
  struct State {
    uint64_t version = 0;
    int64_t optimizer_steps = 0;
    std::string last_committed_write;
    uint64_t last_committed_version = 0;
  };
  State state() const { return {version_, optimizer_steps_, last_committed_write_, last_committed_version_}; }
  void Install(State state);

  // The write under way, to be freed with the rest of the head. It is not published any more.
  std::shared_ptr<StagedWrite> Release() {
    publishing_ = false;
    return std::exchange(staged_, nullptr);
  }

 private:
  absl::Status NoWrite(const std::string& write_id) const;
  void NoteUndone(const std::string& write_id);

  const std::string head_;
  uint64_t version_ = 0;
  int64_t optimizer_steps_ = 0;
  std::shared_ptr<StagedWrite> staged_;
  bool publishing_ = false;
  std::vector<CommitCallback> waiters_;
  std::string last_committed_write_;  // for repeated commits
  uint64_t last_committed_version_ = 0;
  std::deque<std::string> undone_;  // ids, the last ones: their writers are told so
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_WEIGHT_STORE_H_
