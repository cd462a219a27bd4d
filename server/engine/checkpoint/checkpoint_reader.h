// Reads a checkpoint for a restore. Verify opens every file, and Read reads the open files: they stay the
// same even if others take their names meanwhile.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_READER_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_READER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/engine/checkpoint/checkpoint_manifest.h"
#include "server/engine/checkpoint/durable_files.h"
#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

// Move-only; outlived by its store.
class CheckpointReader : public StateSource {
 public:
  CheckpointReader(const DurableFiles* files, std::string folder, std::string tag, Manifest manifest)
      : files_(files), folder_(std::move(folder)), tag_(std::move(tag)), manifest_(std::move(manifest)) {}

  // Reads everything once, several files at a time: DATA_LOSS naming the file whose size or checksum is
  // another one. After it, checkpoint() is complete: with class weights, and the chunks that tiles keep.
  absl::Status Verify();
  // The file must have been verified.
  absl::Status Read(const std::string& name, int64_t offset, std::span<std::byte> out) const override;

  const HeadCheckpoint& checkpoint() const override { return manifest_.head; }
  bool has(const std::string& name) const { return manifest_.files.contains(name); }
  const std::string& tag() const { return tag_; }
  CheckpointInfo info() const { return InfoOf(manifest_, tag_); }

 private:
  friend class CheckpointStore;
  std::string Path(const std::string& name) const;
  absl::Status Open(const std::string& name);
  absl::Status VerifyFiles();
  absl::Status VerifyFile(const std::string& name, const CheckpointFile& expected) const;
  absl::Status LoadClassWeights();
  absl::Status LoadTiles(uint64_t session_number, DeterministicTiles::Content* tiles) const;

  const DurableFiles* files_;
  std::string folder_;
  std::string tag_;
  Manifest manifest_;
  std::map<std::string, FileDescriptor> open_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_READER_H_
