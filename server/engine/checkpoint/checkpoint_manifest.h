// The manifest of a checkpoint: JSON with a checksum over all of it. It may come from anywhere, so everything
// in it is checked before it is used.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_MANIFEST_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_MANIFEST_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/checkpoint/checkpoint.h"
#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

struct Manifest {
  HeadCheckpoint head;  // class weights are in a file of their own
  bool class_weights = false;
  CheckpointFiles files;
};

// DATA_LOSS: `path`, relative to the checkpoint folder, is not as it was written.
absl::Status Damaged(const std::string& path, absl::string_view what);

// The content as text with a checksum, which shows any change to it.
absl::StatusOr<std::string> Sealed(const nlohmann::json& content);
// DATA_LOSS naming `path` if it is not as it was sealed.
absl::StatusOr<nlohmann::json> Unsealed(absl::string_view text, const std::string& path);

absl::StatusOr<std::string> ToText(const Manifest& manifest);
// DATA_LOSS naming `path` and what is wrong: damage, another format, values that no head can have, files that
// do not match the manifest.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text, const std::string& path);
// The same for content that was unsealed.
absl::StatusOr<Manifest> ManifestOf(const nlohmann::json& content, const std::string& path);

// The state of a head alone, from one server to another of the same version. INTERNAL if it cannot be.
absl::StatusOr<std::string> StateToText(const HeadCheckpoint& head);
absl::StatusOr<HeadCheckpoint> ParseState(absl::string_view text);

CheckpointInfo InfoOf(const Manifest& manifest, const std::string& tag);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_MANIFEST_H_
