// The header of a safetensors file. Its first line is the size of the tensor data behind it, in decimal
// digits.
#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string>

#include "proto/safetensors/header.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

using nlohmann::json;

bool Same(const SafetensorsEntry& a, const SafetensorsEntry& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.begin == b.begin && a.end == b.end;
}

void SortByName(std::vector<SafetensorsEntry>* tensors) {
  std::sort(tensors->begin(), tensors->end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.name < b.name; });
}

// The tensors lie in the data, one behind the other, and fill it.
void CheckPlaces(const SafetensorsHeader& header, int64_t data_bytes) {
  int64_t end = 0;
  for (const SafetensorsEntry& tensor : header.tensors) {
    const auto bytes = SafetensorsBytes(tensor.dtype, tensor.shape);
    const bool foreign = !bytes.ok() && bytes.status().message().substr(0, 13) == "unknown dtype";
    Expect(tensor.begin == end && tensor.begin <= tensor.end &&
               (foreign || (bytes.ok() && tensor.end - tensor.begin == *bytes)),
           "a tensor has the bytes that its shape needs, behind the one before it");
    end = tensor.end;
  }
  Expect(end == data_bytes, "the tensors fill the data");
}

// Another reader, which makes a tree of it, sees the same.
void CheckTree(const SafetensorsHeader& header, std::string_view text) {
  const json tree = json::parse(text, nullptr, /*allow_exceptions=*/false);
  Expect(tree.is_object(), "what is accepted is a JSON object");
  const auto metadata = tree.find("__metadata__");
  Expect(tree.size() == header.tensors.size() + (metadata == tree.end() ? 0 : 1), "every tensor is there");
  Expect(metadata == tree.end() ? header.metadata.empty() : *metadata == json(header.metadata),
         "the metadata are what they are");
  for (const SafetensorsEntry& tensor : header.tensors) {
    const json& entry = tree.at(tensor.name);
    Expect(entry.size() >= 3 && entry.at("dtype") == tensor.dtype && entry.at("shape") == tensor.shape &&
               entry.at("data_offsets") == json({tensor.begin, tensor.end}),
           "a tensor is what the tree says of it");
  }
}

void CheckWritten(SafetensorsHeader header, int64_t data_bytes) {
  const auto text = SerializeSafetensorsHeader(header);
  Expect(text.ok() && text->size() % 8 == 0, "what was read can be written, so that the data are aligned");
  auto again = ParseSafetensorsHeader(*text, data_bytes);
  Expect(again.ok(), "what is written is accepted");
  // Tensors without elements share a place.
  SortByName(&header.tensors);
  SortByName(&again->tensors);
  Expect(std::equal(header.tensors.begin(), header.tensors.end(), again->tensors.begin(),
                    again->tensors.end(), &Same) &&
             header.metadata == again->metadata,
         "what is written is read again");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = lossd::fuzz::TextOf(data, size);
  int64_t data_bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), data_bytes);
  if (error != std::errc() || data_bytes < 0 || end == text.data() + text.size() || *end != '\n') return 0;
  const std::string_view json = text.substr(static_cast<size_t>(end - text.data()) + 1);
  const auto header = lossd::ParseSafetensorsHeader({json.data(), json.size()}, data_bytes);
  if (!header.ok()) return 0;
  lossd::fuzz::CheckPlaces(*header, data_bytes);
  lossd::fuzz::CheckTree(*header, json);
  lossd::fuzz::CheckWritten(*header, data_bytes);
  return 0;
}
