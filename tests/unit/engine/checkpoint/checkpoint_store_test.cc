// The folder of checkpoints: whole or not at all, whatever fails, and nothing believed that is damaged.
#include "server/engine/checkpoint/checkpoint_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/checkpoint/checkpoint_manifest.h"
#include "tests/unit/engine/checkpoint/checkpoint_store_fixture.h"

namespace lossd::engine::checkpoint_store_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

TEST_F(CheckpointStoreTest, WhatWasSavedIsFoundAsItWas) {
  const absl::StatusOr<CheckpointInfo> saved = Save("a", 5, 'x');
  ASSERT_TRUE(saved.ok()) << saved.status();
  Open();
  const absl::StatusOr<CheckpointReader> reader = Find("a");
  ASSERT_TRUE(reader.ok()) << reader.status();
  HeadCheckpoint expected = MakeCheckpoint(5);
  expected.saved_at = saved->saved_at;
  const HeadCheckpoint& head = reader->checkpoint();
  EXPECT_EQ(*ToText({head, true, {}}), *ToText({expected, true, {}}));
  EXPECT_EQ(head.config, expected.config);
  EXPECT_EQ(*head.config.class_weights, *expected.config.class_weights);
  EXPECT_EQ(FirstByte(*reader), 'x');
  const Chunk& chunk = head.sessions[0].tiles->kept[0];
  EXPECT_EQ(chunk.labels, labels_);
  EXPECT_EQ(chunk.hidden_states.size(), 2 * kHidden * 4);
  EXPECT_EQ(reader->info().generation, 5U);
  EXPECT_EQ(reader->info().bytes, saved->bytes);
}

TEST_F(CheckpointStoreTest, TheFolderIsTheServersAlone) {
  const std::string path = folder_ / "new";
  ASSERT_TRUE(CheckpointStore::Open(path).ok());
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0700U);
  EXPECT_EQ(CheckpointStore::Open(folder_.path()).status().code(), absl::StatusCode::kFailedPrecondition)
      << "two servers would remove each other's files";
  fs::remove(folder_ / "new/.lock");
  fs::create_directory(folder_ / "new/.lock");
  EXPECT_THAT(std::string(CheckpointStore::Open(path).status().message()),
              HasSubstr("has a file .lock that"));
  EXPECT_EQ(CheckpointStore::Open(folder_ / "missing/new").status().code(),
            absl::StatusCode::kFailedPrecondition);
  CheckpointFolder::Write(folder_ / "file", "");
  EXPECT_EQ(CheckpointStore::Open(folder_ / "file").status().code(), absl::StatusCode::kFailedPrecondition);
}

// What file systems of a network lack is said once, at the start; a disk that fails refuses it.
TEST_F(CheckpointStoreTest, FileSystemsWithoutLocksOrSyncedFoldersAreUsedWithAWarning) {
  struct Case {
    absl::string_view step;
    std::vector<int> errors;
    absl::string_view warned;   // empty: refused
    absl::string_view refused;  // empty: opened
  };
  const Case cases[] = {
      {"sync", {EINVAL, EBADF, ENOSYS, EOPNOTSUPP, 524}, "does not sync folders", ""},
      {"sync", {EIO, ENOSPC, EDQUOT, EROFS}, "", "cannot be synced to the disk"},
      {"lock", {EBADF, ENOLCK, ENOSYS, EOPNOTSUPP, 524, EIO}, "see that no other lossd uses this folder", ""},
      {"lock", {EWOULDBLOCK}, "", "is in use, perhaps by another lossd"},
  };
  int folders = 0;
  for (const Case& one : cases) {
    for (const int error : one.errors) {
      SCOPED_TRACE(absl::StrCat(one.step, " ", error));
      const std::string path = folder_ / absl::StrCat("of", ++folders);
      for (const char* folder : {"made", "there already"}) {
        SCOPED_TRACE(folder);
        const auto fails = [&](absl::string_view step, const std::string& of) {
          const bool is_folder = fs::is_directory(of.empty() ? path : absl::StrCat(path, "/", of));
          return step == one.step && (step == "lock" || is_folder) ? error : 0;
        };
        const auto opened = CheckpointStore::Open(path, fails);
        if (!one.refused.empty()) {
          EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition);
          EXPECT_THAT(std::string(opened.status().message()), HasSubstr(std::string(one.refused)));
          continue;
        }
        ASSERT_TRUE(opened.ok()) << opened.status();
        EXPECT_THAT((*opened)->warnings(), ElementsAre(HasSubstr(std::string(one.warned))));
        EXPECT_EQ((*opened)->Begin("h", "a").status(), absl::OkStatus());
      }
    }
  }
  EXPECT_THAT(store_->warnings(), IsEmpty());
}

TEST_F(CheckpointStoreTest, TagsAndHeadsThatAreNoNamesAreRefused) {
  for (const std::string& name : {std::string(), std::string(".."), std::string(".drain2"),
                                  std::string("a/b"), std::string("-a"), std::string(129, 'a')}) {
    EXPECT_EQ(store_->Begin("h", name).status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(store_->Begin(name, "t").status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(store_->Find(name, "").status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_TRUE(absl::IsNotFound(store_->Find("h", "t").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Find("h", "").status()));
}

TEST_F(CheckpointStoreTest, AFolderThatCannotBeWrittenToIsAPreconditionAndNoFault) {
  for (const int error : {EROFS, EACCES, EPERM}) {
    steps_ = 0;
    failing_step_ = 1;
    fails_for_good_ = true;
    error_ = error;
    const absl::Status status = Save("a", 1, 'x').status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--checkpoint_dir"));
  }
}

TEST_F(CheckpointStoreTest, TheNewestIsFoundAndListsAreNewestFirst) {
  ASSERT_TRUE(Save("b", 1, 'x').ok());
  ASSERT_TRUE(Save("a", 2, 'x').ok());
  Open();  // times go on behind those there are
  ASSERT_TRUE(Save("c", 3, 'x').ok());
  ASSERT_TRUE(Save("b", 4, 'x').ok());
  const auto list = store_->List("");
  ASSERT_TRUE(list.ok());
  std::vector<std::string> tags;
  for (const CheckpointInfo& info : *list) tags.push_back(info.tag);
  EXPECT_EQ(tags, (std::vector<std::string>{"b", "c", "a"}));
  EXPECT_EQ(Find("")->info().generation, 4U);
  EXPECT_THAT(*store_->List("other"), IsEmpty());
}

// Every step that changes the disk fails once, alone or with all that come after it: what is there under the
// tag is the old one or, once it has the name, the new one, and the next save works.
TEST_F(CheckpointStoreTest, WhateverStepFailsTheOldOneOrTheNewOneIsThereWhole) {
  ASSERT_TRUE(Save("a", 1, 'o').ok());
  steps_ = 0;
  ASSERT_TRUE(Save("a", 1, 'o').ok());
  const int steps = steps_;
  ASSERT_GT(steps, 15);
  std::set<std::string> seen;
  for (const bool for_good : {false, true}) {
    for (int step = 1; step <= steps; step += for_good ? 3 : 1) {
      SCOPED_TRACE(step);
      failing_step_ = 0;
      ASSERT_TRUE(Save("a", 1, 'o').ok());
      steps_ = 0;
      failing_step_ = step;
      fails_for_good_ = for_good;
      const absl::StatusOr<CheckpointInfo> saved = Save("a", 2, 'n');
      failing_step_ = 0;
      seen.insert(failed_step_);
      if (!saved.ok()) {
        EXPECT_EQ(saved.status().code(), absl::StatusCode::kResourceExhausted) << saved.status();
        EXPECT_THAT(std::string(saved.status().message()), HasSubstr("'heads"));
        EXPECT_EQ(std::string(saved.status().message()).find(folder_.path()), std::string::npos);
      }
      Open();  // as after a crash
      const absl::StatusOr<CheckpointReader> found = Find("a");
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(FirstByte(*found), found->info().generation == 1 ? 'o' : 'n');
      if (saved.ok()) {
        EXPECT_EQ(found->info().generation, 2U);
      }
      for (const auto& [path, content] : folder_.Files()) {
        EXPECT_EQ(path.find("/."), std::string::npos) << path << " is left over";
      }
    }
  }
  EXPECT_EQ(seen, (std::set<std::string>{"create", "link", "make", "remove", "rename", "sync", "write"}));
}

TEST_F(CheckpointStoreTest, AFolderWhoseNameWasNotSyncedIsSyncedByTheNextSave) {
  failing_step_ = 2;  // "heads" is made, and its name is not synced
  EXPECT_EQ(Save("a", 1, 'x').status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_EQ(failed_step_, "sync");
  ASSERT_TRUE(fs::exists(folder_ / "heads"));
  steps_ = 0;
  EXPECT_FALSE(Save("a", 1, 'x').ok());
  EXPECT_EQ(failed_step_, "sync");
  failing_step_ = 0;
  EXPECT_TRUE(Save("a", 1, 'x').ok());
}

TEST_F(CheckpointStoreTest, ADeletedMarkIsGoneForGood) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  ASSERT_TRUE(store_->MarkDeleted("h").ok());
  steps_ = 0;
  failing_step_ = 2;  // the mark is removed, and its folder is not synced
  EXPECT_EQ(store_->MarkLive("h").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(failed_step_, "sync");
}

TEST_F(CheckpointStoreTest, ASaveWhoseOldFolderCannotBeRemovedIsNoFailure) {
  ASSERT_TRUE(Save("a", 1, 'o').ok());
  steps_ = 0;
  ASSERT_TRUE(Save("a", 2, 'n').ok());
  failing_step_ = steps_;  // of the same steps the last one: what had the name
  steps_ = 0;
  const absl::StatusOr<CheckpointInfo> saved = Save("a", 3, 'm');
  failing_step_ = 0;
  ASSERT_EQ(failed_step_, "remove");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(Find("a")->info().generation, 3U);
  Open();
  EXPECT_EQ(Find("a")->info().generation, 3U);
  EXPECT_FALSE(fs::exists(folder_ / "heads/h/.tmp-a")) << "opening tidies up";
}

TEST_F(CheckpointStoreTest, AReplacementThatBrokeOffBetweenTwoNamesIsUndone) {
  ASSERT_TRUE(Save("a", 1, 'o').ok());
  fs::rename(folder_ / "heads/h/a", folder_ / "heads/h/.old-a");
  Open();
  EXPECT_TRUE(Find("a").ok());
  EXPECT_FALSE(fs::exists(folder_ / "heads/h/.old-a"));
}

TEST_F(CheckpointStoreTest, AFlippedByteInAnyFileIsDataLossThatNamesIt) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  int flipped = 0;
  for (const auto& [path, content] : folder_.Files()) {
    for (size_t i = 0; i < content.size(); i += path.ends_with("manifest.json") ? 7 : 13) {
      std::string changed = content;
      changed[i] = static_cast<char>(changed[i] ^ (i % 2 == 0 ? 0x01 : 0x20));
      CheckpointFolder::Write(folder_ / path, changed);
      const absl::Status status = Find("a").status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << path << " byte " << i << ": " << status;
      ASSERT_THAT(std::string(status.message()), HasSubstr(path));
      ++flipped;
    }
    CheckpointFolder::Write(folder_ / path, content);
  }
  EXPECT_GT(flipped, 300);
  EXPECT_TRUE(Find("a").ok());
}

TEST_F(CheckpointStoreTest, TruncatedMissingAndStrangeFilesAreDataLoss) {
  for (const auto& [path, content] : folder_.Files()) fs::remove(folder_ / path);
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  for (const auto& [path, content] : folder_.Files()) {
    SCOPED_TRACE(path);
    for (const size_t bytes : {size_t{0}, content.size() - 1, content.size() + 1}) {
      CheckpointFolder::Write(folder_ / path, (content + '\0').substr(0, bytes));
      EXPECT_EQ(Find("a").status().code(), absl::StatusCode::kDataLoss) << bytes;
    }
    fs::remove(folder_ / path);
    EXPECT_FALSE(Find("a").ok());
    CheckpointFolder::Write(folder_ / "elsewhere", content);
    fs::create_symlink(folder_ / "elsewhere", folder_ / path);
    EXPECT_FALSE(Find("a").ok()) << "a symbolic link was followed";
    fs::remove(folder_ / path);
    CheckpointFolder::Write(folder_ / path, content);
  }
  EXPECT_TRUE(Find("a").ok());
}

TEST_F(CheckpointStoreTest, ADamagedManifestIsNeverPassedOverForAnOlderCheckpoint) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  ASSERT_TRUE(Save("b", 2, 'x').ok());
  CheckpointFolder::Write(folder_ / "heads/h/b/manifest.json", "{}");
  EXPECT_EQ(Find("").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(Find("a").ok());
  EXPECT_EQ(store_->List("h")->size(), 1U);
}

// What a manifest says with a right checksum all the same.
TEST_F(CheckpointStoreTest, LabelsOfNoEntryAreDataLoss) {
  labels_ = Labels(1, kVocab);
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  const absl::Status found = Find("a").status();
  EXPECT_EQ(found.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(found.message().find("labels[1] is"), absl::string_view::npos) << found;
}

template <typename Value>
std::string BytesOf(std::initializer_list<Value> values) {
  return {reinterpret_cast<const char*>(std::data(values)), values.size() * sizeof(Value)};
}

// Lists of the chunk that a tile holds, whose labels are 1 and that of an ignored token.
ChunkLists Kept(std::initializer_list<int64_t> offsets, std::initializer_list<int32_t> ids) {
  return {.use = ChunkLists::Use::kKept, .offsets = BytesOf(offsets), .tokens = BytesOf(ids)};
}
ChunkLists Targets(std::initializer_list<int64_t> offsets, std::initializer_list<int32_t> ids,
                   std::initializer_list<float> probabilities) {
  ChunkLists lists = Kept(offsets, ids);
  lists.use = ChunkLists::Use::kTargets;
  lists.probabilities = BytesOf(probabilities);
  lists.label_weight = 0.1f;
  return lists;
}

class CheckpointListsTest : public CheckpointStoreTest {
 protected:
  // Reads what was written. `more`: bytes that the manifest has for lists beyond these.
  absl::StatusOr<Chunk> WrittenAndRead(const ChunkLists& lists, int64_t more = 0) {
    absl::StatusOr<std::unique_ptr<CheckpointWriter>> writer = store_->Begin("h", "a");
    if (!writer.ok()) return writer.status();
    const auto add = [&](const std::string& name, const std::string& content) {
      return (*writer)->Add(name, "", [&](const CheckpointWriter::Append& append) {
        return append(std::as_bytes(std::span(content)));
      });
    };
    const std::string rows(kVocab * kHidden * 4, '\0');
    const std::string factors(16, '\0');
    absl::Status status = add(TensorFile("weight"), rows);
    if (status.ok()) status = add(SessionGradient(4), rows);
    const std::string hidden(static_cast<size_t>(2 * kHidden * 4 + more), '\0');
    if (status.ok()) {
      status = add(TilesFile(4),
                   absl::StrCat(labels_, factors, lists.offsets, lists.tokens, lists.probabilities, hidden));
    }
    if (!status.ok()) return status;
    HeadCheckpoint head = MakeCheckpoint(1);
    head.sessions[0].tiles->kept[0].lists = lists;
    head.sessions[0].tiles->list_bytes = lists.bytes() + more;
    if (const auto info = store_->Commit(**writer, head); !info.ok()) return info.status();
    const absl::StatusOr<CheckpointReader> reader = Find("a");
    if (!reader.ok()) return reader.status();
    return reader->checkpoint().sessions[0].tiles->kept[0];
  }
};

TEST_F(CheckpointListsTest, ListsAreReadAsTheyWereWritten) {
  for (const ChunkLists& lists : {Kept({0, 2, 5}, {7, 1, 2, 3, 4}), Kept({0, 1, 1}, {1}),
                                  Targets({0, 2, 3}, {0, 5, 7}, {0.5f, 0.25f, 9})}) {
    const absl::StatusOr<Chunk> chunk = WrittenAndRead(lists);
    ASSERT_TRUE(chunk.ok()) << chunk.status();
    EXPECT_EQ(chunk->lists.use, lists.use);
    EXPECT_EQ(chunk->lists.offsets, lists.offsets);
    EXPECT_EQ(chunk->lists.tokens, lists.tokens);
    EXPECT_EQ(chunk->lists.probabilities, lists.probabilities);
    EXPECT_EQ(chunk->lists.label_weight, lists.label_weight);
  }
  const absl::StatusOr<Chunk> chunk = WrittenAndRead(Targets({0, 2, 2}, {5, 0}, {0.5f, 0.25f}));
  ASSERT_TRUE(chunk.ok()) << chunk.status();
  EXPECT_EQ(chunk->lists.tokens, BytesOf<int32_t>({0, 5})) << "in the order that kernels want";
  EXPECT_EQ(chunk->lists.probabilities, BytesOf({0.25f, 0.5f}));
}

TEST_F(CheckpointListsTest, ListsThatNoChunkCanHaveAreDataLossAndTakeNoMemory) {
  constexpr int64_t kHuge = int64_t{1} << 61;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::pair<std::string, ChunkLists>> cases = {
      {"lists of -1 tokens", Kept({0, 2, -1}, {1, 2})},
      {"lists of 1048577 tokens", Kept({0, 2, kMostListedTokens + 1}, {1, 2})},
      {"lists of 2305843009213693952 tokens", Kept({0, 2, kHuge}, {1, 2})},
      {"lists of 3 tokens", Kept({0, 2, 3}, {1, 2})},
      {"offsets[0] is 1", Kept({1, 2, 2}, {1, 2})},
      {"offsets[2] is 1", Kept({0, 2, 1}, {1})},
      {"it has 4 bytes of no list", Kept({0, 1, 1}, {1, 2})},
      {"ids[1] is 8", Kept({0, 2, 2}, {1, 8})},
      {"ids[0] is -1", Kept({0, 2, 2}, {-1, 1})},
      {"has already", Kept({0, 2, 2}, {1, 1})},
      {"labels[0] is 1", Kept({0, 2, 2}, {2, 3})},
      {"is empty", Kept({0, 0, 2}, {2, 3})},
      {"[0] is nan", Targets({0, 2, 2}, {2, 3}, {kNaN, 0})},
      {"[1] is -1", Targets({0, 2, 2}, {2, 3}, {0, -1})},
      {"add up to 2", Targets({0, 2, 2}, {2, 3}, {1, 1})},
  };
  for (const auto& [what, lists] : cases) {
    SCOPED_TRACE(what);
    const absl::Status status = WrittenAndRead(lists).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(status.message(), HasSubstr(what));
  }
  const absl::Status more = WrittenAndRead(Kept({0, 1, 1}, {1}), 8).status();
  EXPECT_EQ(more.code(), absl::StatusCode::kDataLoss) << more;
  EXPECT_THAT(more.message(), HasSubstr("it has 8 bytes of no list"));
}

TEST_F(CheckpointStoreTest, ManifestsThatGoDeepAreDataLoss) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  const size_t depth = 200000;
  std::ofstream(folder_.path() + "/heads/h/a/manifest.json")
      << "{\"content\":" << std::string(depth, '[') << std::string(depth, ']') << ",\"xxh3\":\"\"}";
  EXPECT_EQ(Find("a").status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointStoreTest, HostileManifestsAreDataLossAndTakeNoMemory) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  const fs::path path = folder_ / "heads/h/a/manifest.json";
  const std::string text = CheckpointFolder::Read(path);
  const auto with = [&](const std::string& pointer, const nlohmann::json& value) {
    nlohmann::json content = *Unsealed(text, "m");
    content[nlohmann::json::json_pointer(pointer)] = value;
    CheckpointFolder::Write(path, *Sealed(content));
    return Find("a").status();
  };
  ASSERT_TRUE(with("/head/restores", 1).ok());
  const int64_t huge = int64_t{1} << 61;
  for (const auto& [pointer, value] : std::vector<std::pair<std::string, nlohmann::json>>{
           {"/format", 2},
           {"/head/config/vocab_size", huge},
           {"/head/config/vocab_size", -1},
           {"/head/config/vocab_size", 8.5},
           {"/head/config/hidden_size", 5},
           {"/head/config/name", "other"},
           {"/head/config/name", "../../etc"},
           {"/head/config/weight_dtype", "float8"},
           {"/head/config/optimizer/kind", 17},
           {"/head/config/optimizer/beta1", 2},
           {"/head/weight_version", -3},
           {"/head/tensors/0/rows", huge},
           {"/head/tensors/0/columns", 5},
           {"/head/tensors/0/name", "exp_avg"},
           {"/head/gradients/0", "../gradient"},
           {"/head/gradients/0", 3},
           {"/head/sessions/0/lanes", nlohmann::json::array()},
           {"/head/sessions/0/lanes/1/base", 10},
           {"/head/sessions/0/lanes/1/rejected", {5, 2}},
           {"/head/sessions/0/number", 5},
           {"/head/sessions/0/tiles/tile_tokens", 0},
           {"/head/sessions/0/tiles/next_tile", 7},
           {"/head/sessions/0/tiles/taken", {{3, 1}}},
           {"/head/sessions/0/tiles/taken", {{1, huge * 2}}},
           {"/head/sessions/0/tiles/filled", {{0, 5}}},
           {"/head/sessions/0/tiles/kept/0/tokens", huge},
           {"/head/sessions/0/tiles/kept/0/place", -1},
           {"/head/sessions/0/tiles/kept/0/hidden_dtype", 3},
           {"/files/..~1..~1passwd", {{"bytes", 1}, {"xxh3", "00"}}},
           {"/files/tensor.weight/bytes", huge},
           {"/files/tensor.weight/xxh3", "none"},
           {"/files/more", {{"bytes", 1}, {"xxh3", "00"}}},
           {"/head/sessions", "none"}}) {
    const absl::Status status = with(pointer, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << pointer << " " << value << ": " << status;
  }
}

TEST_F(CheckpointStoreTest, WhatHasNotChangedIsSharedWithTheCheckpointBefore) {
  const auto inode = [this](const std::string& tag) {
    struct stat status {};
    EXPECT_EQ(stat((folder_ / ("heads/h/" + tag + "/tensor.weight")).c_str(), &status), 0);
    return status.st_ino;
  };
  ASSERT_TRUE(Save("a", 1, 'x', "version 1").ok());
  const int64_t all = bytes_written_;
  ASSERT_TRUE(Save("b", 2, 'y', "version 1").ok());
  EXPECT_EQ(inode("a"), inode("b"));
  EXPECT_EQ(FirstByte(*Find("b")), 'x');
  EXPECT_LT(bytes_written_, all);
  ASSERT_TRUE(Save("a", 3, 'y', "version 2").ok());
  EXPECT_NE(inode("a"), inode("b"));
  EXPECT_EQ(FirstByte(*Find("a")), 'y');
  EXPECT_EQ(FirstByte(*Find("b")), 'x');
  // The one that it would share is gone, or another one.
  fs::remove(folder_ / "heads/h/a/tensor.weight");
  ASSERT_TRUE(Save("c", 4, 'y', "version 2").ok());
  EXPECT_TRUE(Find("c").ok());
  CheckpointFolder::Write(folder_ / "heads/h/c/tensor.weight", std::string(kVocab * kHidden * 4, 'z'));
  ASSERT_TRUE(Save("d", 5, 'y', "version 2").ok());
  EXPECT_EQ(FirstByte(*Find("d")), 'y');
  // A new process knows none, but for what it has read.
  Open();
  ASSERT_TRUE(Save("e", 6, 'y', "version 2").ok());
  EXPECT_NE(inode("d"), inode("e"));
  const absl::StatusOr<CheckpointReader> reader = Find("e");
  store_->Remember(*reader, "tensor.weight", "restored");
  ASSERT_TRUE(Save("f", 7, 'y', "restored").ok());
  EXPECT_EQ(inode("e"), inode("f"));
}

TEST_F(CheckpointStoreTest, ADrainIsTakenOnceAndCanBeGivenBackUntouched) {
  EXPECT_EQ(store_->ReadDrain()->has_value(), false);
  ASSERT_TRUE(store_->WriteDrain({"incarnation", {{"h", 7}}}).ok());
  Open();
  const auto drain = store_->ReadDrain();
  ASSERT_TRUE(drain.ok() && drain->has_value()) << drain.status();
  EXPECT_EQ((*drain)->incarnation, "incarnation");
  EXPECT_EQ((*drain)->heads, (std::map<std::string, int64_t>{{"h", 7}}));
  ASSERT_TRUE(store_->ConsumeDrain().ok());
  EXPECT_EQ(store_->ReadDrain()->has_value(), false);
  ASSERT_TRUE(store_->ReturnDrain().ok());
  EXPECT_EQ(store_->ReadDrain()->has_value(), true);
  const std::string text = CheckpointFolder::Read(folder_ / "drain.json");
  for (size_t i = 0; i < text.size(); i += 3) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ 0x04);
    CheckpointFolder::Write(folder_ / "drain.json", changed);
    ASSERT_EQ(store_->ReadDrain().status().code(), absl::StatusCode::kDataLoss) << i;
  }
}

TEST_F(CheckpointStoreTest, NoDrainButTheLastIsGivenBack) {
  ASSERT_TRUE(store_->WriteDrain({"first", {{"h", 1}}}).ok());
  ASSERT_TRUE(store_->ConsumeDrain().ok());
  ASSERT_TRUE(store_->WriteDrain({"second", {{"h", 2}}}).ok());
  ASSERT_TRUE(store_->ReturnDrain().ok()) << "it was not taken, so that there is nothing to do";
  EXPECT_EQ((*store_->ReadDrain())->incarnation, "second");
  fs::remove(folder_ / "drain.json");  // an operator's decision
  EXPECT_FALSE(store_->ConsumeDrain().ok());
  EXPECT_FALSE(store_->ReturnDrain().ok());
  EXPECT_EQ(store_->ReadDrain()->has_value(), false);
}

TEST_F(CheckpointStoreTest, NumbersOfRestoresOnlyGoUp) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  const uint64_t many = uint64_t{1} << 20;
  const auto next = [this](const RestoreNumbers& saved, const RestoreNumbers& now) {
    const absl::StatusOr<RestoreNumbers> numbers = store_->NextRestore("h", saved, now);
    EXPECT_TRUE(numbers.ok()) << numbers.status();
    return std::pair(numbers->restores, numbers->weight_version);
  };
  EXPECT_EQ(next({4, 3}, {0, 9}), std::pair(uint64_t{5}, uint64_t{10})) << "a head knows its versions";
  EXPECT_EQ(next({4, 3}, {0, 0}), std::pair(uint64_t{6}, many + 10));
  ASSERT_TRUE(store_->MarkDeleted("h").ok());
  Open();
  EXPECT_EQ(next({0, 0}, {0, 0}), std::pair(uint64_t{7}, many + 10));
  EXPECT_EQ(next({4, 3}, {0, 5}), std::pair(uint64_t{8}, 2 * many + 10)) << "another head of that name";
  EXPECT_EQ(next({4, 3}, {12, 0}), std::pair(uint64_t{13}, 3 * many + 10));
  EXPECT_EQ(store_->List("h")->size(), 1U) << "they are no checkpoint";
  const nlohmann::json huge = {{"format", 1}, {"restores", ~uint64_t{0}}, {"weight_version", 1}};
  for (const std::string& text : {std::string("{}"), *Sealed(huge)}) {
    CheckpointFolder::Write(folder_ / "heads/h/.restores", text);
    EXPECT_EQ(store_->NextRestore("h", {}, {}).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST_F(CheckpointStoreTest, ADeletedHeadKeepsItsCheckpointsButIsNotLive) {
  ASSERT_TRUE(Save("a", 1, 'x').ok());
  ASSERT_TRUE(store_->MarkDeleted("h").ok());
  ASSERT_TRUE(store_->MarkDeleted("unknown").ok());
  EXPECT_THAT(*store_->LiveHeads(), IsEmpty());
  EXPECT_TRUE(Find("a").ok());
  ASSERT_TRUE(store_->Begin("h", "b").ok());
  EXPECT_THAT(*store_->LiveHeads(), IsEmpty()) << "nothing was committed";
  ASSERT_TRUE(Save("b", 1, 'x').ok());
  EXPECT_EQ(store_->LiveHeads()->size(), 1U);
}

}  // namespace
}  // namespace lossd::engine::checkpoint_store_test
