#include "client/examples/train_lm/saved_run.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <utility>

namespace {
int error_of_folders = 0;  // what fsync of a folder fails with
}  // namespace

// Stands in the place of the C library's.
extern "C" int fsync(int file) {
  struct stat info {};
  if (error_of_folders == 0 || fstat(file, &info) != 0 || !S_ISDIR(info.st_mode)) {
    return static_cast<int>(syscall(SYS_fsync, file));
  }
  errno = error_of_folders;
  return -1;
}

namespace lossd::train_lm::saved_run_test {
namespace {

class SavedRunTest : public ::testing::Test {
 protected:
  SavedRunTest() {
    std::string name = (std::filesystem::temp_directory_path() / "saved-run-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~SavedRunTest() override { std::filesystem::remove_all(folder_); }

  static SavedRun MakeRun() {
    SavedRun run{.settings = "s",
                 .head_tag = "t",
                 .trainer = {},
                 .tokens = 7,
                 .training_seconds = 0.1,
                 .losses = {},
                 .evaluations = {}};
    run.trainer = {.steps = 3, .epoch = 2, .next_position = 5, .trunk = {}};
    run.trainer.trunk = {.parameters = {1.5F, -0.0F, 1e-30F},
                         .adam = {.steps = 3, .first = {1, 2, 3}, .second = {4, 5, 6}},
                         .forwards = 9};
    run.losses = {1.0 / 3, 2};
    run.evaluations = {{2, 17.25}};
    return run;
  }

  std::string folder_;
};

TEST_F(SavedRunTest, IsReadAsItWasWritten) {
  EXPECT_FALSE(ReadSavedRun(folder_)->has_value());
  const SavedRun run = MakeRun();
  ASSERT_TRUE(WriteSavedRun(folder_, {}).ok());
  ASSERT_TRUE(WriteSavedRun(folder_, run).ok());
  const auto read = ReadSavedRun(folder_);
  ASSERT_TRUE(read.ok() && read->has_value()) << read.status();
  const SavedRun& again = **read;
  EXPECT_EQ(again.settings, "s");
  EXPECT_EQ(again.head_tag, "t");
  EXPECT_EQ(again.tokens, 7);
  EXPECT_EQ(again.losses, run.losses);
  EXPECT_EQ(again.evaluations, run.evaluations);
  EXPECT_EQ(again.trainer.steps, 3);
  EXPECT_EQ(again.trainer.epoch, 2U);
  EXPECT_EQ(again.trainer.next_position, 5U);
  EXPECT_EQ(again.trainer.trunk.parameters, run.trainer.trunk.parameters);
  EXPECT_TRUE(std::signbit(again.trainer.trunk.parameters[1]));
  EXPECT_EQ(again.trainer.trunk.adam.second, run.trainer.trunk.adam.second);
  EXPECT_EQ(again.trainer.trunk.adam.steps, 3);
  EXPECT_EQ(again.trainer.trunk.forwards, 9U);
}

TEST_F(SavedRunTest, OnlyAFolderThatADiskFailsToSyncIsAnError) {
  const std::pair<int, bool> cases[] = {{EINVAL, true}, {EBADF, true},   {EOPNOTSUPP, true}, {EPERM, true},
                                        {EIO, false},   {ENOSPC, false}, {EDQUOT, false}};
  for (const auto& [error, written] : cases) {
    error_of_folders = error;
    EXPECT_EQ(WriteSavedRun(folder_, MakeRun()).ok(), written) << strerror(error);
    error_of_folders = 0;
    EXPECT_TRUE(ReadSavedRun(folder_)->has_value());
  }
}

TEST_F(SavedRunTest, HalfAFileIsNoRun) {
  ASSERT_TRUE(WriteSavedRun(folder_, MakeRun()).ok());
  const auto path = std::filesystem::path(folder_) / "train_lm.run";
  const auto size = std::filesystem::file_size(path);
  for (const uintmax_t bytes : {size - 1, size - 12, uintmax_t{10}, uintmax_t{0}}) {
    std::filesystem::resize_file(path, bytes);
    EXPECT_EQ(ReadSavedRun(folder_).status().code(), absl::StatusCode::kDataLoss) << bytes;
  }
}

TEST(TrainerStateTest, ASamplerGoesOnWhereAnotherStood) {
  std::vector<int64_t> all(10);
  std::iota(all.begin(), all.end(), 0);
  Sampler sampler(all, 3);
  std::vector<int64_t> drawn(27);
  sampler.Draw(drawn);
  Sampler other(all, 3);
  other.SkipTo(sampler.epoch(), sampler.next());
  std::vector<int64_t> next(15);
  std::vector<int64_t> next_of_other(15);
  sampler.Draw(next);
  other.Draw(next_of_other);
  EXPECT_EQ(next, next_of_other);
}

TEST(TrainerStateTest, ATrunkGoesOnWhereAnotherStood) {
  const TrunkConfig config = {
      .vocabulary = 20, .hidden = 8, .embedding = 4, .context = 2, .history = 3, .seed = 5};
  ThreadPool pool(1);
  const std::vector<int32_t> text = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const std::vector<int64_t> positions = {4, 6, 9};
  const auto step = [&](Trunk& trunk) {
    std::vector<float> hidden(positions.size() * 8);
    trunk.Forward(TrunkMode::kTraining, text, positions, hidden);
    trunk.Backward(text, hidden);
    trunk.Step(0.01);
  };
  Trunk trunk(config, {.weight_decay = 0.1}, &pool);
  for (int i = 0; i < 3; ++i) step(trunk);
  Trunk other(config, {.weight_decay = 0.1}, &pool);
  step(other);
  other.Restore(trunk.state());
  for (int i = 0; i < 3; ++i) {
    step(trunk);
    step(other);
  }
  EXPECT_TRUE(trunk.state().parameters == other.state().parameters);
}

}  // namespace
}  // namespace lossd::train_lm::saved_run_test
