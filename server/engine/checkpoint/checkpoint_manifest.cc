#include "server/engine/checkpoint/checkpoint_manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/engine/checkpoint/checkpoint_json.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;

std::string Digest(const std::string& text) {
  return absl::StrCat(absl::Hex(XXH3_64bits(text.data(), text.size()), absl::kZeroPad16));
}

json FilesToJson(const CheckpointFiles& files) {
  json object = json::object();
  for (const auto& [name, file] : files) {
    object[name] = {{"bytes", file.bytes},
                    {"xxh3", absl::StrCat(absl::Hex(file.checksum, absl::kZeroPad16))}};
  }
  return object;
}

CheckpointFiles FilesFromJson(const json& object) {
  CheckpointFiles files;
  for (const auto& [name, file] : object.items()) {
    // A name of ours, and not a way out of the folder.
    if (!IsName(name)) throw std::invalid_argument("a file has a name that no file of a checkpoint has");
    CheckpointFile& entry = files[name];
    entry.bytes = ToInteger(file.at("bytes"), 0, std::numeric_limits<int64_t>::max());
    const auto checksum = file.at("xxh3").get<std::string>();
    if (!absl::SimpleHexAtoi(checksum, &entry.checksum)) {
      throw std::invalid_argument("a file's checksum is none");
    }
  }
  return files;
}

// Adds `name` to the files that there must be.
void Expect(const std::string& name, int64_t bytes, CheckpointFiles* expected) {
  if (!expected->emplace(name, CheckpointFile{bytes, 0}).second) {
    throw std::invalid_argument(absl::StrCat("file ", name, " is named twice"));
  }
}

int64_t BytesOf(const DeterministicTiles::Content& tiles, int64_t hidden_size) {
  int64_t bytes = tiles.list_bytes;
  for (const Chunk& chunk : tiles.kept) {
    bytes += chunk.tokens * (8 + hidden_size * kernels::SizeOf(chunk.hidden_type)) +
             static_cast<int64_t>(chunk.token_weights.size() + chunk.lse_gradients.size() +
                                  chunk.entropy_gradients.size());
  }
  return bytes;
}

// The files that belong to what the manifest says, and their sizes.
CheckpointFiles ExpectedFiles(const Manifest& manifest) {
  const HeadCheckpoint& head = manifest.head;
  CheckpointFiles expected;
  if (manifest.class_weights) Expect(kClassWeightsFile, head.config.vocab_size * 4, &expected);
  for (const StateTensor& tensor : head.tensors) {
    // The head is one that there can be: no product of these overflows.
    if (tensor.rows != head.config.vocab_size ||
        (tensor.columns != head.config.hidden_size && tensor.columns != 1)) {
      throw std::invalid_argument(absl::StrCat("tensor ", tensor.name, " has another shape than the head"));
    }
    Expect(TensorFile(tensor.name), tensor.rows * tensor.columns * kernels::SizeOf(tensor.type), &expected);
  }
  for (const std::string& gradient : head.gradients) {
    Expect(gradient, head.config.gradient_bytes(), &expected);
    if (head.config.bias) Expect(BiasOf(gradient), head.config.bias_gradient_bytes(), &expected);
  }
  for (const SessionCheckpoint& session : head.sessions) {
    if (!session.tiles.has_value() || session.tiles->kept.empty()) continue;
    Expect(TilesFile(session.session.number), BytesOf(*session.tiles, head.config.hidden_size), &expected);
  }
  return expected;
}

void CheckFiles(const Manifest& manifest) {
  const CheckpointFiles expected = ExpectedFiles(manifest);
  for (const auto& [name, file] : manifest.files) {
    if (!expected.contains(name)) {
      throw std::invalid_argument(absl::StrCat("file ", name, " belongs to nothing"));
    }
  }
  for (const auto& [name, file] : expected) {
    const auto there = manifest.files.find(name);
    if (there == manifest.files.end()) {
      throw std::invalid_argument(absl::StrCat("file ", name, " is missing"));
    }
    if (there->second.bytes != file.bytes) {
      throw std::invalid_argument(
          absl::StrCat("file ", name, " has ", there->second.bytes, " bytes; ", file.bytes, " belong to it"));
    }
  }
}

json ContentOf(const Manifest& manifest) {
  return {{"format", kFormat},
          {"head", ToJson(manifest.head)},
          {"class_weights", manifest.class_weights},
          {"files", FilesToJson(manifest.files)}};
}

Manifest FromJson(const json& content) {
  if (content.at("format") != kFormat) {
    throw std::invalid_argument(
        absl::StrCat("its format is ", content.at("format").dump(), "; this lossd reads ", kFormat));
  }
  Manifest manifest;
  manifest.files = FilesFromJson(content.at("files"));
  manifest.class_weights = content.at("class_weights").get<bool>();
  manifest.head = HeadFromJson(content.at("head"));
  if (absl::Status valid = Validate(manifest.head.config); !valid.ok()) {
    throw std::invalid_argument(std::string(valid.message()));
  }
  CheckFiles(manifest);
  // A manifest that says more, written by a newer server or with a number that was rounded here, is refused:
  // the rest would be lost silently. Texts are compared, since 105 and 105.0 are equal as values.
  if (ContentOf(manifest).dump() != content.dump()) {
    throw std::invalid_argument("it says something that this lossd does not know, or would not say so");
  }
  return manifest;
}

}  // namespace

absl::Status Damaged(const std::string& path, absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, RejectReason::kCheckpoint, "",
                   absl::StrCat("'", path, "' of --checkpoint_dir is damaged (", what,
                                "): restore another checkpoint, or remove the folder it is in"));
}

absl::StatusOr<std::string> Sealed(const json& content) {
  try {
    return absl::StrCat(json{{"content", content}, {"xxh3", Digest(content.dump())}}.dump(1), "\n");
  } catch (const json::exception& error) {
    return MakeError(absl::StatusCode::kInternal, RejectReason::kCheckpoint, "",
                     absl::StrCat("a checkpoint cannot be described: ", error.what()));
  }
}

absl::StatusOr<json> Unsealed(absl::string_view text, const std::string& path) {
  // dump() below recurses as deep as the document is nested.
  constexpr int kMostDepth = 32;
  bool too_deep = false;
  const auto watch = [&too_deep](int depth, json::parse_event_t /*event*/, const json& /*value*/) {
    too_deep = too_deep || depth > kMostDepth;
    return !too_deep;
  };
  json sealed = json::parse(text, watch, /*allow_exceptions=*/false);
  if (too_deep) return Damaged(path, "it is no manifest");
  if (!sealed.is_object() || !sealed.contains("content") || !sealed.contains("xxh3")) {
    return Damaged(path, "it is no manifest");
  }
  try {
    // The first comparison finds changes that the other two miss, such as white space.
    if (absl::StrCat(sealed.dump(1), "\n") != text || sealed.size() != 2 ||
        sealed.at("xxh3") != Digest(sealed.at("content").dump())) {
      return Damaged(path, "its checksum is another one");
    }
  } catch (const json::exception& error) {
    return Damaged(path, error.what());
  }
  return std::move(sealed.at("content"));
}

absl::StatusOr<std::string> ToText(const Manifest& manifest) {
  try {
    return Sealed(ContentOf(manifest));
  } catch (const json::exception& error) {
    return MakeError(absl::StatusCode::kInternal, RejectReason::kCheckpoint, "",
                     absl::StrCat("a checkpoint cannot be described: ", error.what()));
  }
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view text, const std::string& path) {
  const absl::StatusOr<json> content = Unsealed(text, path);
  if (!content.ok()) return content.status();
  return ManifestOf(*content, path);
}

absl::StatusOr<Manifest> ManifestOf(const json& content, const std::string& path) {
  try {
    return FromJson(content);
  } catch (const std::exception& error) {  // the library's, and ours for values that cannot be
    return Damaged(path, error.what());
  }
}

absl::StatusOr<std::string> StateToText(const HeadCheckpoint& head) {
  try {
    return ToJson(head).dump();
  } catch (const json::exception& error) {
    return absl::InternalError(absl::StrCat("a head's state cannot be described: ", error.what()));
  }
}

absl::StatusOr<HeadCheckpoint> ParseState(absl::string_view text) {
  try {
    return HeadFromJson(json::parse(text));
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("a head's state cannot be read: ", error.what()));
  }
}

CheckpointInfo InfoOf(const Manifest& manifest, const std::string& tag) {
  const HeadCheckpoint& head = manifest.head;
  CheckpointInfo info{.head = head.config.name,
                      .tag = tag,
                      .generation = head.window.generation,
                      .weight_version = head.weight_version,
                      .optimizer_steps = head.optimizer_steps,
                      .window_tokens = head.window.tokens,
                      .bytes = 0,
                      .saved_at = head.saved_at};
  for (const auto& [name, file] : manifest.files) info.bytes += file.bytes;
  return info;
}

}  // namespace lossd::engine
