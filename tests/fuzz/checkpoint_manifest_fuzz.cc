// The manifest of a checkpoint: its text as it comes, and, since no mutation would find the checksum, its
// content under a right one.
#include <nlohmann/json.hpp>
#include <string>

#include "server/engine/checkpoint/checkpoint_manifest.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

using engine::Manifest;
using engine::ParseManifest;
using nlohmann::json;

constexpr char kPath[] = "heads/h/a/manifest.json";

// As Unsealed has it: what is deeper does not get so far.
json ParseContent(std::string_view text) {
  constexpr int kMostDepth = 31;
  bool too_deep = false;
  const auto watch = [&too_deep](int depth, json::parse_event_t /*event*/, const json& /*value*/) {
    too_deep = too_deep || depth > kMostDepth;
    return !too_deep;
  };
  json content = json::parse(text, watch, /*allow_exceptions=*/false);
  return too_deep ? json(json::value_t::discarded) : content;
}

void CheckManifest(const Manifest& manifest, const json& content) {
  Expect(engine::Validate(manifest.head.config).ok(), "a head that is accepted is one that there can be");
  const auto text = engine::ToText(manifest);
  Expect(text.ok(), "what was read can be written");
  const auto sealed = engine::Sealed(content);
  Expect(sealed.ok() && json::parse(*text) == json::parse(*sealed), "nothing of it is lost or another");
  const auto again = ParseManifest(*text, kPath);
  Expect(again.ok() && *engine::ToText(*again) == *text, "what is written is read again");
  int64_t bytes = 0;
  for (const auto& [name, file] : manifest.files) {
    Expect(name.find('/') == std::string::npos && name != "..", "files are in their folder");
    bytes += file.bytes;
  }
  Expect(engine::InfoOf(manifest, "a").bytes == bytes, "the files have the size that is shown");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text = lossd::fuzz::TextOf(data + 1, size - 1);
  if (data[0] == 's') {
    // A text that is accepted is the very one that is written.
    const auto manifest = lossd::engine::ParseManifest({text.data(), text.size()}, lossd::fuzz::kPath);
    if (manifest.ok()) {
      lossd::fuzz::Expect(*lossd::engine::ToText(*manifest) == text, "it is the text that is written");
    }
    return 0;
  }
  const auto content = lossd::fuzz::ParseContent(text);
  if (content.is_discarded()) return 0;
  const auto manifest = lossd::engine::ManifestOf(content, lossd::fuzz::kPath);
  if (manifest.ok()) lossd::fuzz::CheckManifest(*manifest, content);
  return 0;
}
