// The index of a model in several files, and the files' names in it.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "proto/safetensors/index.h"
#include "proto/safetensors/input_file.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

using nlohmann::json;

// What a tree of the same text has for a map, if it is one of text.
bool IsMapOfText(const json& tree) {
  if (!tree.is_object() || !tree.contains("weight_map") || !tree.at("weight_map").is_object()) return false;
  for (const auto& [name, file] : tree.at("weight_map").items()) {
    if (!file.is_string()) return false;
  }
  return true;
}

void CheckName(const std::string& file) {
  if (!StaysInside(file)) return;
  const std::string place = (std::filesystem::path("/models") / file).lexically_normal().string();
  Expect(place.starts_with("/models/"), "a file's name does not lead out of the folder");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = lossd::fuzz::TextOf(data, size);
  const auto map = lossd::ParseSafetensorsIndex({text.data(), text.size()});
  if (!map.ok()) return 0;
  const auto tree = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  lossd::fuzz::Expect(lossd::fuzz::IsMapOfText(tree), "what is accepted has a map of text");
  lossd::fuzz::Expect(tree.at("weight_map") == nlohmann::json(*map), "the map is what the tree has");
  for (const auto& [name, file] : *map) lossd::fuzz::CheckName(file);
  return 0;
}
