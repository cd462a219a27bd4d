// Checkpoints in a folder, each in one of its own that is there whole or not at all:
//
//   heads/HEAD/TAG/manifest.json   what the head was, and every file's size and checksum
//   heads/HEAD/TAG/tensor.weight   and so on: tensors, raw, row by row, little-endian
//   heads/HEAD/.drain/             the last drain's, beside those with tags
//   heads/HEAD/.restores           the numbers that the last restore gave, which none gives again
//   heads/HEAD/.deleted            no start brings the head back
//   .lock                          held by the server that uses the folder
//   drain.json                     there only between a drain and the start that goes on from it
//
// A checkpoint is written to a folder beside, synced and then renamed; what a crash leaves behind is removed
// when the store is opened. Files that have not changed are shared with an earlier checkpoint by hard links,
// so files are never written to again.
//
// Not thread-safe, but for what CheckpointWriter and CheckpointReader do between Begin and Commit.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_STORE_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_STORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/checkpoint/checkpoint.h"
#include "server/engine/checkpoint/checkpoint_reader.h"
#include "server/engine/checkpoint/checkpoint_writer.h"
#include "server/engine/checkpoint/durable_files.h"
#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

inline constexpr char kDrainTag[] = ".drain";  // which no caller can name

// What a drained server leaves to the next one.
struct DrainRecord {
  std::string incarnation;
  // By name: when their drain checkpoints were saved; 0 of one that could not be, which goes back to its
  // newest.
  std::map<std::string, int64_t> heads;
  std::set<std::string> parked = {};  // those of them that were
};

class CheckpointStore {
 public:
  // Makes the folder if it is not there, and tidies up behind a crash.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& folder,
                                                               DurableFiles::Fault fault = nullptr);

  // DurableFiles::warnings of the folder.
  const std::vector<std::string>& warnings() const { return files_.warnings(); }

  // The tag, which may be taken, gets its checkpoint with Commit.
  absl::StatusOr<std::unique_ptr<CheckpointWriter>> Begin(const std::string& head, const std::string& tag);
  absl::StatusOr<CheckpointInfo> Commit(CheckpointWriter& writer, HeadCheckpoint head);

  // The checkpoint of this tag or, if it is empty, the newest one, the last drain's included. NOT_FOUND if
  // there is none; DATA_LOSS if a manifest that matters is damaged.
  absl::StatusOr<CheckpointReader> Find(const std::string& head, const std::string& tag);
  // Newest first, of all heads if `head` is empty; without those whose manifests cannot be read.
  absl::StatusOr<std::vector<CheckpointInfo>> List(const std::string& head) const;
  // Removes one for good, also one whose manifest cannot be read. Once it returns ok, no crash brings it
  // back. NOT_FOUND if there is none of this tag; the drain's cannot be named.
  absl::StatusOr<DeletedCheckpoint> Delete(const std::string& head, const std::string& tag);
  // A tag PREFIX-NUMBER (NUMBER: decimal digits behind the last hyphen) belongs to the row of its prefix. Of
  // the row that `tag` belongs to: all but the `keep` that were saved last, the newest first. Nothing if
  // `tag` is in no row; what cannot be read is in none.
  absl::StatusOr<std::vector<std::string>> BeyondNewest(const std::string& head, const std::string& tag,
                                                        int64_t keep) const;
  // Everything in the folder counts. Thread-safe, as Space is.
  absl::StatusOr<FolderBytes> Measure() const { return files_.Measure(""); }
  absl::StatusOr<DiskSpace> Space() const { return files_.Space(); }
  // Heads that have checkpoints.
  absl::StatusOr<std::vector<std::string>> Heads() const;
  // The same, without heads that were deleted after their last save.
  absl::StatusOr<std::vector<std::string>> LiveHeads() const;
  // A checkpoint that is committed makes its head live.
  absl::Status MarkDeleted(const std::string& head) const;
  absl::Status MarkLive(const std::string& head) const;
  // Numbers for the next restore of a checkpoint with `saved` to a head with `now`. No head of this name ever
  // had them, on any server, deleted heads included. They are on the disk when this returns.
  absl::StatusOr<RestoreNumbers> NextRestore(const std::string& head, const RestoreNumbers& saved,
                                             const RestoreNumbers& now) const;
  // A file that was read from a checkpoint is known by this key from now on, as if it had been written.
  void Remember(const CheckpointReader& reader, const std::string& file, const std::string& key);

  absl::Status WriteDrain(const DrainRecord& record);
  // Nothing if there is none.
  absl::StatusOr<std::optional<DrainRecord>> ReadDrain() const;
  // ConsumeDrain takes the record away, whatever happens to the process. ReturnDrain brings it back if
  // nothing was done with it.
  absl::Status ConsumeDrain();
  absl::Status ReturnDrain();

 private:
  explicit CheckpointStore(DurableFiles files) : files_(std::move(files)) {}

  absl::Status TidyUp();
  absl::Status TidyUpHead(const std::string& head);
  // Tags of a head, the drain's included.
  absl::StatusOr<std::vector<std::string>> Tags(const std::string& head) const;
  absl::StatusOr<RestoreNumbers> LastRestore(const std::string& head) const;
  absl::StatusOr<Manifest> ReadManifest(const std::string& head, const std::string& tag) const;

  const DurableFiles files_;
  KnownFiles known_;
  int64_t last_saved_at_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_STORE_H_
