// A checkpoint on its way to the disk.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_WRITER_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/engine/checkpoint/checkpoint.h"
#include "server/engine/checkpoint/durable_files.h"
#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

// A file of an earlier checkpoint whose content is known by a key.
struct KnownFile {
  std::string key;
  std::string path;
  FileIdentity identity;
  CheckpointFile file;
};
using KnownFiles = std::map<std::pair<std::string, std::string>, KnownFile>;  // by head and name

// One that is not committed removes what it wrote.
class CheckpointWriter : public StateSink {
 public:
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  ~CheckpointWriter() override;

  // A file: shared with an earlier checkpoint if that has one of this key, otherwise what `fill` appends. An
  // empty key is never shared.
  absl::Status Add(const std::string& name, const std::string& key,
                   absl::FunctionRef<absl::Status(const Append& append)> fill) override;

  const std::string& head() const { return head_; }
  const std::string& tag() const { return tag_; }
  int64_t bytes_written() const { return bytes_written_; }

 private:
  friend class CheckpointStore;
  CheckpointWriter(const DurableFiles* files, const KnownFiles* known, std::string head, std::string tag);

  absl::Status Begin();
  bool Share(const std::string& name, const std::string& key);
  // When this returns ok, all files and the manifest are on the disk under their names.
  absl::Status Finish(const std::string& manifest, KnownFiles* known);

  struct File {
    FileDescriptor descriptor;  // none of a shared one
    std::string key;
    CheckpointFile file;
  };

  const DurableFiles* files_;
  const KnownFiles* known_;
  std::string head_;
  std::string tag_;
  std::string folder_;     // that it will be
  std::string temporary_;  // empty: committed
  std::map<std::string, File> written_;
  int64_t bytes_written_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_WRITER_H_
