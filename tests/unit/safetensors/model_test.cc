// Models: a file, a folder with one, a folder with an index of shards; and those that a server opens below a
// folder of its own, which nothing leads out of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "proto/safetensors/index.h"
#include "proto/safetensors/safetensors.h"
#include "tests/unit/safetensors/safetensors_fixture.h"

namespace lossd::model_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::OneTensor;
using testing::RawFile;
using testing::SafetensorsTest;
using ::testing::UnorderedElementsAre;
namespace fs = std::filesystem;

TEST_F(SafetensorsTest, AShardedModelFindsATensorInItsShard) {
  fs::create_directory(directory_ / "sub");
  WriteRaw("one.safetensors", RawFile(OneTensor("F32", "[1]", "[0,4]"), 4));
  WriteRaw("sub/two.safetensors", RawFile(R"({"u":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", 4));
  WriteRaw("model.safetensors.index.json",
           R"({"metadata":{"total_size":8},"weight_map":{"t":"one.safetensors","u":"sub/two.safetensors",)"
           R"("gone":"three.safetensors","moved":"one.safetensors"}})");
  for (const std::string& path : {directory_.string(), Path("model.safetensors.index.json")}) {
    auto model = SafetensorsModel::Open(path);
    ASSERT_TRUE(model.ok()) << model.status();
    auto u = model->Find("u");
    ASSERT_TRUE(u.ok()) << u.status();
    EXPECT_EQ(u->dtype, SafetensorsType::kBFloat16);
    auto t = model->Find("t");
    ASSERT_TRUE(t.ok()) << t.status();
    EXPECT_EQ(t->dtype, SafetensorsType::kFloat32);
    EXPECT_EQ(u->data[3], std::byte{1}) << "opening a second shard unmapped the first";
    EXPECT_TRUE(model->Contains("gone"));
    EXPECT_FALSE(model->Contains("none"));
    for (const char* name : {"gone", "moved", "none"}) {
      EXPECT_EQ(model->Find(name).status().code(), absl::StatusCode::kNotFound) << name;
    }
  }
}

TEST_F(SafetensorsTest, ADirectoryWithOneFileAndAPlainFileAreModelsToo) {
  EXPECT_EQ(SafetensorsModel::Open(directory_).status().code(), absl::StatusCode::kNotFound);
  WriteRaw("model.safetensors", RawFile(OneTensor("F32", "[1]", "[0,4]"), 4));
  for (const std::string& path : {directory_.string(), Path("model.safetensors")}) {
    auto model = SafetensorsModel::Open(path);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(model->Find("t").ok());
    EXPECT_EQ(model->Find("x").status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(SafetensorsTest, ShardPathsThatLeaveTheDirectoryAndMalformedIndexesAreRefused) {
  for (const char* index : {
           R"({"weight_map":{"t":"../x.safetensors"}})",
           R"({"weight_map":{"t":"sub/../../x.safetensors"}})",
           R"({"weight_map":{"t":"/etc/passwd"}})",
           R"({"weight_map":{"t":""}})",
           R"({"weight_map":{"t":".."}})",
           R"({"weight_map":{"t":"x\u0000y"}})",
           R"({"weight_map":{"t":7}})",
           R"({"weight_map":{"t":{"file":"x"}}})",
           R"({"weight_map":{"t":["x"]}})",
           R"({"weight_map":{"t":"x","t":"y"}})",
           R"({"weight_map":{"t":"x","\u0074":"y"}})",
           R"({"weight_map":{},"weight_map":{}})",
           R"({"weight_map":{}}{})",
           R"({"other":{"weight_map":{"t":"x"}}})",
           R"({"weight_map":["t"]})",
           R"({"weight_map":)",
           R"({})",
           R"([])",
           "",
       }) {
    WriteRaw("model.safetensors.index.json", index);
    EXPECT_EQ(SafetensorsModel::Open(directory_).status().code(), absl::StatusCode::kInvalidArgument)
        << index;
  }
}

TEST_F(SafetensorsTest, WhatElseAnIndexHoldsIsPassedOverHoweverDeep) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  const auto map = ParseSafetensorsIndex(R"({"metadata":{"weight_map":{"no":"no"},"deep":)" + deep +
                                         R"(},"weight_map":{"t":"x"},"t":[{"u":"v"}],"u":1})");
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_THAT(*map, ElementsAre(std::pair<const std::string, std::string>("t", "x")));
}

TEST(SafetensorsIndex, EveryTruncationAndEveryFlippedBitIsSurvived) {
  const std::string whole = R"({"metadata":{"total_size":8},"weight_map":{"t":"one","u":"two"}})";
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ParseSafetensorsIndex(whole.substr(0, size)).ok()) << size;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      const auto map = ParseSafetensorsIndex(flipped);
      if (!map.ok()) continue;
      EXPECT_EQ(map->size(), 2U) << at << " " << bit;
    }
  }
}

TEST_F(SafetensorsTest, TensorsAreFoundByTheirShapeInEveryShard) {
  WriteRaw("one", RawFile(R"({"t":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                          R"("ids":{"dtype":"I32","shape":[2,3],"data_offsets":[24,48]}})",
                          48));
  WriteRaw("two", RawFile(R"({"u":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
                          R"("v":{"dtype":"BF16","shape":[3,2],"data_offsets":[12,24]}})",
                          24));
  WriteRaw("model.safetensors.index.json", R"({"weight_map":{"t":"one","ids":"one","u":"two","v":"two"}})");
  auto model = SafetensorsModel::Open(directory_);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto names = model->FindByShape({2, 3});
  ASSERT_TRUE(names.ok()) << names.status();
  EXPECT_THAT(*names, UnorderedElementsAre("t", "u"));
  std::vector<std::byte> bytes(24);
  EXPECT_TRUE(model->Read(*model->Find("t"), 0, bytes).ok());
}

// Below a folder

class BelowTest : public SafetensorsTest {
 protected:
  void SetUp() override {
    SafetensorsTest::SetUp();
    fs::create_directories(directory_ / "root" / "model");
    fs::create_directories(directory_ / "rootless");
    const std::string file = RawFile(OneTensor("F32", "[1]", "[0,4]"), 4);
    WriteRaw("secret", file);
    WriteRaw("rootless/secret", file);
    WriteRaw("root/blob", file);
    WriteRaw("root/model/model.safetensors", file);
  }
  absl::Status Open(const std::string& path) const {
    auto model = SafetensorsModel::OpenBelow(directory_ / "root", path);
    return model.ok() ? model->Find("t").status() : model.status();
  }
};

TEST_F(BelowTest, FilesFoldersAndLinksInsideAreOpened) {
  fs::create_symlink("../blob", directory_ / "root" / "model" / "inside");
  fs::create_symlink(directory_ / "root" / "blob", directory_ / "root" / "absolute");
  fs::create_symlink("model", directory_ / "root" / "latest");
  fs::create_directory_symlink(directory_ / "root", directory_ / "alias");
  for (const char* path : {"blob", "model", "model/", "./model/model.safetensors", "model/inside", "absolute",
                           "latest", "latest/inside"}) {
    EXPECT_TRUE(Open(path).ok()) << path << ": " << Open(path);
  }
  EXPECT_TRUE(SafetensorsModel::OpenBelow(directory_ / "alias", "latest").ok());
}

TEST_F(BelowTest, PathsThatLeaveTheFolderAreRefused) {
  const std::string nul("blob\0x", 6);
  for (const std::string& path :
       {std::string(), std::string(".."), std::string("../secret"), std::string("model/../../secret"),
        std::string("model/../blob"), (directory_ / "root" / "blob").string(), nul}) {
    const absl::Status status = Open(path);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("relative")) << path;
  }
}

TEST_F(BelowTest, LinksThatLeaveTheFolderAreRefusedAndNothingOfThePlaceIsTold) {
  const fs::path root = directory_ / "root";
  fs::create_symlink("../secret", root / "relative");
  fs::create_symlink(directory_ / "secret", root / "absolute");
  fs::create_symlink("../rootless", root / "sibling");  // its name begins with the folder's
  fs::create_symlink("..", root / "up");
  fs::create_symlink("/proc/self/fd", root / "magic");
  fs::create_symlink("../../secret", root / "model" / "model.safetensors.index.json");
  for (const char* path : {"relative", "absolute", "sibling/secret", "up/secret", "up", "magic", "model"}) {
    const absl::Status status = Open(path);
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << path << ": " << status;
    EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr(directory_.string()))) << path;
  }
  EXPECT_THAT(std::string(Open("absent").message()), ::testing::Not(HasSubstr(directory_.string())));
}

TEST_F(BelowTest, LinksThatLeadInACircleAreRefused) {
  const fs::path root = directory_ / "root";
  fs::create_symlink("circle", root / "circle");
  fs::create_symlink("there", root / "back");
  fs::create_symlink("back", root / "there");
  fs::create_symlink("model.safetensors.index.json", root / "model" / "model.safetensors.index.json");
  for (const char* path : {"circle", "circle/blob", "there", "model"}) {
    const absl::Status status = Open(path);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path << ": " << status;
    EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr(directory_.string()))) << path;
  }
}

TEST_F(BelowTest, ShardsThatLeaveTheFolderAreRefused) {
  fs::create_symlink("../../secret", directory_ / "root" / "model" / "shard");
  WriteRaw("root/model/model.safetensors.index.json", R"({"weight_map":{"t":"shard"}})");
  EXPECT_EQ(Open("model").code(), absl::StatusCode::kPermissionDenied);
  WriteRaw("root/model/model.safetensors.index.json", R"({"weight_map":{"t":"../blob"}})");
  EXPECT_EQ(Open("model").code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(BelowTest, PipesAndDevicesAreNotOpened) {
  ASSERT_EQ(mkfifo(Path("root/pipe").c_str(), 0600), 0);
  EXPECT_EQ(Open("pipe").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsModel::OpenBelow("/dev", "null").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::model_test
