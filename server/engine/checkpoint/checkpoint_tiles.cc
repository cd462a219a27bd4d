// What the tiles of a deterministic session hold, in a manifest: everything but the chunks' tensors, for
// which it says how large they are.
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/loss_options.h"
#include "server/engine/checkpoint/checkpoint_json.h"

namespace lossd::engine {
namespace {

using nlohmann::json;
using TokenPairs = std::map<int64_t, int64_t>;

constexpr int64_t kMostPlace = std::numeric_limits<int64_t>::max() / 2;
constexpr int64_t kMostTileTokens = 4096;
constexpr int64_t kLeastInteger = std::numeric_limits<int64_t>::min();
constexpr int64_t kMostInteger = std::numeric_limits<int64_t>::max();

constexpr char kKeptTokens[] = "kept_tokens";
constexpr char kTargets[] = "target_lists";

[[noreturn]] void Refuse(const char* what) { throw std::invalid_argument(what); }

json PairsToJson(const TokenPairs& pairs) {
  json all = json::array();
  for (const auto& [first, second] : pairs) all.push_back({first, second});
  return all;
}

TokenPairs PairsFromJson(const json& from) {
  TokenPairs pairs;
  for (const auto& pair : from) {
    const int64_t first = ToInteger(pair.at(0), kLeastInteger, kMostInteger);
    if (!pairs.emplace(first, ToInteger(pair.at(1), kLeastInteger, kMostInteger)).second) {
      Refuse("a place is given twice");
    }
  }
  return pairs;
}

template <typename T>
json FromOptional(const std::optional<T>& value) {
  return value.has_value() ? json(*value) : json(nullptr);
}
std::optional<float> FloatOf(const json& value) {
  if (value.is_null()) return std::nullopt;
  return value.get<float>();
}
template <typename Enum>
json FromEnum(const std::optional<Enum>& value) {
  return value.has_value() ? json(*value == Enum::kUse) : json(nullptr);
}
template <typename Enum>
std::optional<Enum> EnumOf(const json& value) {
  if (value.is_null()) return std::nullopt;
  return value.get<bool>() ? Enum::kUse : Enum::kIgnore;
}

// Null without lists. Numbers of the lists' tokens are in the file of the tiles.
json ListsToJson(const ChunkLists& lists) {
  if (lists.use == ChunkLists::Use::kNone) return nullptr;
  if (lists.use == ChunkLists::Use::kKept) return {{"use", kKeptTokens}};
  return {{"use", kTargets}, {"weight", lists.weight}, {"label_weight", lists.label_weight}};
}
ChunkLists ListsFromJson(const json& from) {
  ChunkLists lists;
  const auto use = from.at("use").get<std::string>();
  if (use != kKeptTokens && use != kTargets) Refuse("lists of tokens are for nothing that is known");
  lists.use = use == kTargets ? ChunkLists::Use::kTargets : ChunkLists::Use::kKept;
  if (lists.use == ChunkLists::Use::kKept) return lists;
  lists.weight = from.at("weight").get<float>();
  lists.label_weight = from.at("label_weight").get<float>();
  return lists;
}

json ChunkToJson(const Chunk& chunk) {
  const ChunkOptions& options = chunk.options;
  json object = {{"place", *chunk.window_token},
                 {"tokens", chunk.tokens},
                 {"hidden_dtype", static_cast<int>(chunk.hidden_type)},
                 {"ignore_index", chunk.ignore_index},
                 {"gradient_scale", chunk.gradient_scale},
                 {"token_weights", !chunk.token_weights.empty()},
                 {"lse_gradients", !chunk.lse_gradients.empty()},
                 {"entropy_gradients", !chunk.entropy_gradients.empty()},
                 {"lists", ListsToJson(chunk.lists)},
                 {"class_weights", FromEnum(options.class_weights)},
                 {"bias", FromEnum(options.bias)},
                 {"z_gradient_scale", FromOptional(options.z_gradient_scale)}};
  for (const kernels::LossOption& option : kernels::kLossOptions) {
    const bool is_set = options.IsSet(option.value);
    object[option.name] = is_set ? json(options.loss.*option.value) : json(nullptr);
  }
  return object;
}

Chunk ChunkFromJson(const json& from) {
  Chunk chunk;
  chunk.window_token = ToInteger(from.at("place"), 0, kMostPlace);
  chunk.tokens = ToInteger(from.at("tokens"), 1, kMostTileTokens);
  constexpr auto kLastType = static_cast<int64_t>(kernels::DataType::kFloat16);
  chunk.hidden_type = static_cast<kernels::DataType>(ToInteger(from.at("hidden_dtype"), 0, kLastType));
  chunk.ignore_index = ToInteger(from.at("ignore_index"), kLeastInteger, kMostInteger);
  chunk.gradient_scale = from.at("gradient_scale").get<float>();
  const auto floats = static_cast<size_t>(chunk.tokens) * sizeof(float);
  chunk.labels.resize(2 * floats);
  if (from.at("token_weights").get<bool>()) chunk.token_weights.resize(floats);
  if (from.at("lse_gradients").get<bool>()) chunk.lse_gradients.resize(floats);
  if (from.at("entropy_gradients").get<bool>()) chunk.entropy_gradients.resize(floats);
  if (const json& lists = from.at("lists"); !lists.is_null()) {
    chunk.lists = ListsFromJson(lists);
    chunk.lists.offsets.resize(2 * floats + sizeof(int64_t));
  }
  ChunkOptions& options = chunk.options;
  for (const kernels::LossOption& option : kernels::kLossOptions) {
    if (const auto value = FloatOf(from.at(option.name))) options.Set(option.value, *value);
  }
  options.class_weights = EnumOf<ClassWeights>(from.at("class_weights"));
  options.bias = EnumOf<Bias>(from.at("bias"));
  options.z_gradient_scale = FloatOf(from.at("z_gradient_scale"));
  return chunk;
}

void Check(const DeterministicTiles::Content& content) {
  const int64_t tile = content.tile_tokens;
  int64_t end = -1;
  for (const auto& [begin, range_end] : content.taken) {
    if (begin <= end || range_end <= begin || range_end > kMostPlace) {
      Refuse("places of a session are out of order");
    }
    end = range_end;
  }
  for (const auto& [number, tokens] : content.filled) {
    if (number < content.next_tile || number > kMostPlace / tile || tokens < 1 || tokens > tile) {
      Refuse("a tile of a session has too many tokens, or none");
    }
  }
  end = 0;
  for (const Chunk& chunk : content.kept) {
    const int64_t begin = *chunk.window_token;
    const auto range = content.taken.upper_bound(begin);
    const bool taken = range != content.taken.begin() && std::prev(range)->second >= begin + chunk.tokens;
    const bool in_one = begin / tile == (begin + chunk.tokens - 1) / tile;
    if (begin < end || !taken || !in_one || begin / tile < content.next_tile) {
      Refuse("chunks of a session's tiles are out of place");
    }
    end = begin + chunk.tokens;
  }
}

}  // namespace

json ToJson(const DeterministicTiles::Content& tiles) {
  json kept = json::array();
  for (const Chunk& chunk : tiles.kept) kept.push_back(ChunkToJson(chunk));
  return {{"tile_tokens", tiles.tile_tokens},  {"next_tile", tiles.next_tile},
          {"taken", PairsToJson(tiles.taken)}, {"filled", PairsToJson(tiles.filled)},
          {"kept", std::move(kept)},           {"list_bytes", tiles.list_bytes}};
}

DeterministicTiles::Content TilesFromJson(const json& from) {
  DeterministicTiles::Content tiles;
  tiles.tile_tokens = ToInteger(from.at("tile_tokens"), 1, kMostTileTokens);
  tiles.next_tile = ToInteger(from.at("next_tile"), 0, kMostPlace / tiles.tile_tokens);
  tiles.taken = PairsFromJson(from.at("taken"));
  tiles.filled = PairsFromJson(from.at("filled"));
  for (const auto& chunk : from.at("kept")) tiles.kept.push_back(ChunkFromJson(chunk));
  tiles.list_bytes = ToCount(from.at("list_bytes"));
  Check(tiles);
  return tiles;
}

}  // namespace lossd::engine
