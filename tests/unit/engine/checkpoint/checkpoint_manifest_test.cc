#include "server/engine/checkpoint/checkpoint_manifest.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lossd::engine::checkpoint_manifest_test {
namespace {

using nlohmann::json;

constexpr char kPath[] = "heads/h/a/manifest.json";

// A manifest of a head with a session that has two lanes, and tiles with a chunk.
Manifest Written() {
  Manifest manifest;
  HeadCheckpoint& head = manifest.head;
  head.config.name = "h";
  head.config.vocab_size = 4;
  head.config.hidden_size = 2;
  head.config.fixed_segments = true;
  head.config.held_bytes = 4096;
  head.ancestors = {{{"i", 3}, 7, {}}};
  head.window.last_step.result.stats.largest = 0.1f;
  head.last_session_number = 1;
  SessionCheckpoint& session = head.sessions.emplace_back();
  session.id = "s";
  session.session.number = 1;
  session.session.lanes.resize(2);
  session.tiles.emplace();
  session.tiles->tile_tokens = 4;
  session.tiles->taken = {{0, 2}};
  session.tiles->filled = {{0, 2}};
  Chunk& chunk = session.tiles->kept.emplace_back();
  chunk.window_token = 0;
  chunk.tokens = 2;
  chunk.hidden_type = kernels::DataType::kBFloat16;
  chunk.options.Set(&kernels::LossOptions::softcap, 2.5f);
  head.window.generation = 2;
  head.window.last_step.generation = 1;
  head.window.last_step.marks = {{"s", {{1, 0, 0}}}, {"gone", {{70, 9, 0}}}};
  manifest.files[TilesFile(1)] = {2 * (8 + 4), 7};
  return manifest;
}

json Content() { return *Unsealed(*ToText(Written()), kPath); }

TEST(CheckpointManifestTest, WhatIsWrittenIsReadAgain) {
  const std::string text = *ToText(Written());
  const auto manifest = ParseManifest(text, kPath);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(*ToText(*manifest), text);
}

TEST(CheckpointManifestTest, ALaneThatOnlyLookedIsKnownAsOne) {
  Manifest manifest = Written();
  AccumulationLedger::Lane& lane = manifest.head.sessions[0].session.lanes[1];
  lane.accepted = lane.started = lane.applied = 5;
  for (const uint64_t added : {uint64_t{2}, uint64_t{3}}) {
    lane.base = 2;
    lane.added = added;
    const auto read = ParseManifest(*ToText(manifest), kPath);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->head.sessions[0].session.lanes[1].only_looked(), added == 2);
  }
}

// How long lists are all together is in the manifest.
TEST(CheckpointManifestTest, ListsOfTokensInTilesAreKept) {
  Manifest manifest = Written();
  DeterministicTiles::Content& tiles = *manifest.head.sessions[0].tiles;
  tiles.kept[0].lists.use = ChunkLists::Use::kTargets;
  tiles.kept[0].lists.weight = 0.1f;
  tiles.list_bytes = 64;
  manifest.files[TilesFile(1)].bytes += 64;
  const std::string text = *ToText(manifest);
  const auto read = ParseManifest(text, kPath);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*ToText(*read), text);
  const ChunkLists& lists = read->head.sessions[0].tiles->kept[0].lists;
  EXPECT_EQ(lists.use, ChunkLists::Use::kTargets);
  EXPECT_EQ(lists.weight, 0.1f);
  EXPECT_EQ(lists.label_weight, 0);
  const std::string tiles_at = "/head/sessions/0/tiles";
  for (const auto& [pointer, value] :
       std::vector<std::pair<std::string, json>>{{"/list_bytes", 65},
                                                 {"/list_bytes", -1},
                                                 {"/list_bytes", 64.0},
                                                 {"/list_bytes", 1e300},
                                                 {"/kept/0/lists/use", "other"},
                                                 {"/kept/0/lists/use", "kept_tokens"},
                                                 {"/kept/0/lists/use", 2},
                                                 {"/kept/0/lists/weight", "1"},
                                                 {"/kept/0/lists/more", 1},
                                                 {"/kept/0/lists", json::object()}}) {
    json content = *Unsealed(text, kPath);
    content[json::json_pointer(tiles_at + pointer)] = value;
    EXPECT_EQ(ParseManifest(*Sealed(content), kPath).status().code(), absl::StatusCode::kDataLoss)
        << pointer << " " << value;
  }
}

// Under a right checksum. What is not taken as it stands would be lost, or be another value.
TEST(CheckpointManifestTest, WhatWouldBeReadAsAnotherValueIsDataLoss) {
  const int64_t beyond = int64_t{1} << 32;
  for (const auto& [pointer, value] :
       std::vector<std::pair<std::string, json>>{{"/format", 1.5},
                                                 {"/format", true},
                                                 {"/format", beyond + 1},
                                                 {"/files/tiles.1/bytes", 24.5},
                                                 {"/files/tiles.1/bytes", 1e300},
                                                 {"/files/tiles.1/xxh3", "0x7"},
                                                 {"/files/tiles.1/more", 1},
                                                 {"/head/more", 1},
                                                 {"/head/config/fixed_segments", 1},
                                                 {"/head/config/held_bytes", -1},
                                                 {"/head/config/optimizer/eps", false},
                                                 {"/head/config/softcap", "0"},
                                                 {"/head/config/softcap", 0},  // written as 0.0
                                                 {"/head/restores", ~uint64_t{0}},
                                                 {"/head/weight_version", ~uint64_t{0}},
                                                 {"/head/sessions/0/rank", 1e300},
                                                 {"/head/sessions/0/rank", 0.5},
                                                 {"/head/sessions/0/rank", beyond},
                                                 {"/head/sessions/0/lanes/1/more", 0},
                                                 {"/head/sessions/0/lanes/1/accepted", ~uint64_t{0}},
                                                 {"/head/window/tokens", ~uint64_t{0}},
                                                 {"/head/window/generation", 0},
                                                 {"/head/window/generation", 1},  // the last step's
                                                 {"/head/window/last_step/marks/0/lanes/0/0", 2},
                                                 {"/head/window/last_step/marks/0/lanes/0/0", -1},
                                                 {"/head/window/last_step/marks/0/lanes/0/1", 1},
                                                 {"/head/sessions/0/tiles/tile_tokens", 4.5},
                                                 {"/head/sessions/0/tiles/next_tile", 1e300},
                                                 {"/head/sessions/0/tiles/taken/0/1", 1e300},
                                                 {"/head/sessions/0/tiles/filled/0/1", 2.5},
                                                 {"/head/sessions/0/tiles/kept/0/place", 1e300},
                                                 {"/head/sessions/0/tiles/kept/0/tokens", 2.5},
                                                 {"/head/sessions/0/tiles/kept/0/hidden_dtype", 4e9},
                                                 {"/head/sessions/0/tiles/kept/0/ignore_index", 1e300},
                                                 {"/head/sessions/0/tiles/kept/0/ignore_index", ~uint64_t{0}},
                                                 {"/head/sessions/0/tiles/kept/0/gradient_scale", 0.1},
                                                 {"/head/sessions/0/tiles/kept/0/softcap", true}}) {
    json content = Content();
    content[json::json_pointer(pointer)] = value;
    const absl::Status status = ParseManifest(*Sealed(content), kPath).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << pointer << " " << value << ": " << status;
  }
}

}  // namespace
}  // namespace lossd::engine::checkpoint_manifest_test
