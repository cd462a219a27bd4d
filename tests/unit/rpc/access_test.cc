#include "server/rpc/transport/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "server/rpc/calls/methods.h"
#include "server/telemetry/common/service_counters.h"
#include "tests/unit/rpc/no_files.h"

namespace lossd::rpc::access_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTrainer[] = "trainer-0123456789";
constexpr char kAdmin[] = "admin-0123456789ab";

class AccessTest : public ::testing::Test {
 protected:
  AccessTest()
      : folder_(std::filesystem::temp_directory_path() / "lossd-access-XXXXXX"), counters_(MethodNames()) {
    if (mkdtemp(folder_.data()) == nullptr) std::abort();
    Write(std::string("trainer ") + kTrainer + "\nadmin " + kAdmin + "\n");
    access_ = *AccessControl::Create(Path(), &counters_);
    struct stat status {};
    if (stat(Path().c_str(), &status) != 0) std::abort();
    made_ = status.st_ctim;
  }
  ~AccessTest() override { std::filesystem::remove_all(folder_); }

  std::string Path() const { return folder_ + "/tokens"; }
  void Write(const std::string& text) const {
    std::ofstream(Path() + ".new") << text;
    std::filesystem::rename(Path() + ".new", Path());
  }

  grpc::Status Call(const std::string& path, const std::string& authorization) {
    CallMetadata metadata{{":path", path}, {"authorization", authorization}};
    return access_->Process(metadata, nullptr, nullptr, nullptr);
  }
  grpc::StatusCode Code(const std::string& path, const std::string& authorization) {
    return Call(path, authorization).error_code();
  }

  std::string folder_;
  timespec made_{};
  telemetry::ServiceCounters counters_;
  std::shared_ptr<AccessControl> access_;
};

constexpr char kDelete[] = "/lossd.v1.HeadService/DeleteHead";

TEST_F(AccessTest, ARefusalIsCountedByItsReasonAndAsACallOfItsMethod) {
  EXPECT_EQ(Code(kDelete, std::string("Bearer ") + kAdmin), grpc::StatusCode::OK);
  EXPECT_EQ(Code(kDelete, std::string("bearer ") + kAdmin), grpc::StatusCode::OK) << "schemes have no case";
  EXPECT_EQ(Code(kDelete, std::string("Bearer ") + kTrainer), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Code(kDelete, "Bearer unknown"), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Code(kDelete, kAdmin), grpc::StatusCode::UNAUTHENTICATED) << "it has no scheme";
  EXPECT_EQ(counters_.access.role, 1U);
  EXPECT_EQ(counters_.access.unknown_token, 1U);
  EXPECT_EQ(counters_.access.no_token, 1U);
  const telemetry::RpcMethod* method = counters_.rpcs.Find("HeadService/DeleteHead");
  ASSERT_NE(method, nullptr);
  EXPECT_EQ(method->ended[grpc::StatusCode::UNAUTHENTICATED], 2U);
  EXPECT_EQ(method->ended[grpc::StatusCode::PERMISSION_DENIED], 1U);
  EXPECT_EQ(method->ended[grpc::StatusCode::OK], 0U) << "the service counts those";
  EXPECT_TRUE(counters_.errors.Read().empty()) << "strangers push nothing out";
  EXPECT_THAT(Call(kDelete, std::string("Bearer ") + kTrainer).error_message(), Not(HasSubstr(kTrainer)));
}

TEST_F(AccessTest, WhatAStrangerMakesUpIsRefusedAndNotRemembered) {
  for (const char* path :
       {"", "/", "/x/y", "/lossd.v1.HeadService/DeleteHead/", "//lossd.v1.HeadService/DeleteHead",
        "/LOSSD.v1.HeadService/DeleteHead", "/grpc.health.v1.Health/", "/HeadService/DeleteHead",
        "HeadService/DeleteHead", "/lossd.v1.grpc.health.v1.Health/Check", "grpc.health.v1.Health/Check"}) {
    EXPECT_EQ(Code(path, "none"), grpc::StatusCode::UNAUTHENTICATED) << path;
    EXPECT_EQ(Code(path, std::string("Bearer ") + kAdmin), grpc::StatusCode::UNIMPLEMENTED) << path;
  }
  EXPECT_TRUE(counters_.errors.Read().empty());
  EXPECT_EQ(counters_.access.role, 0U) << "a method that is not there needs no role";
  CallMetadata nothing;
  EXPECT_EQ(access_->Process(nothing, nullptr, nullptr, nullptr).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(AccessTest, AChangedFileIsReadOnceAndABadOneChangesNothing) {
  EXPECT_FALSE(access_->Poll().has_value());
  Write(std::string("admin ") + kTrainer + "\n");
  const auto changed = access_->Poll();
  ASSERT_TRUE(changed.has_value());
  ASSERT_TRUE(changed->ok()) << changed->status();
  EXPECT_EQ((*changed)->tokens, 1U);
  EXPECT_FALSE(access_->Poll().has_value());
  EXPECT_EQ(Code(kDelete, std::string("Bearer ") + kTrainer), grpc::StatusCode::OK);
  EXPECT_EQ(Code(kDelete, std::string("Bearer ") + kAdmin), grpc::StatusCode::UNAUTHENTICATED);
  Write("admin short\n");
  const auto bad = access_->Poll();
  ASSERT_TRUE(bad.has_value());
  EXPECT_TRUE(absl::IsInvalidArgument(bad->status())) << bad->status();
  EXPECT_EQ(Code(kDelete, std::string("Bearer ") + kTrainer), grpc::StatusCode::OK);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(access_->Poll().has_value()) << "it was told once";
  Write("admin\n");
  EXPECT_TRUE(access_->Poll().has_value()) << "for another reason";
}

TEST_F(AccessTest, WhoAsksForItIsToldOfAFileThatHasNotChanged) {
  for (int i = 0; i < 2; ++i) {
    const auto read = access_->Poll(Look::kAnyway);
    ASSERT_TRUE(read.has_value());
    ASSERT_TRUE(read->ok()) << read->status();
    EXPECT_EQ((*read)->change.added + (*read)->change.removed + (*read)->change.other_role, 0);
  }
  Write("admin short\n");
  for (int i = 0; i < 2; ++i) {
    const auto bad = access_->Poll(Look::kAnyway);
    ASSERT_TRUE(bad.has_value()) << "each time it is asked for";
    EXPECT_TRUE(absl::IsInvalidArgument(bad->status())) << bad->status();
  }
  EXPECT_EQ(Code(kDelete, std::string("Bearer ") + kAdmin), grpc::StatusCode::OK);
}

TEST_F(AccessTest, AFileThatCouldNotBeReadIsReadAgainThoughItStaysAsItIs) {
  Write(std::string("admin ") + kTrainer + "\n");
  {
    const testing::NoFileCanBeOpened nothing;
    const auto failed = access_->Poll();
    ASSERT_TRUE(failed.has_value());
    EXPECT_FALSE(failed->ok());
    EXPECT_FALSE(access_->Poll().has_value());
  }
  const auto changed = access_->Poll();
  ASSERT_TRUE(changed.has_value());
  EXPECT_TRUE(changed->ok()) << changed->status();
  EXPECT_EQ(Code(kDelete, std::string("Bearer ") + kTrainer), grpc::StatusCode::OK);
  EXPECT_FALSE(access_->Poll().has_value());
}

TEST_F(AccessTest, AChangeThatKeepsSizeAndTimeIsSeen) {
  const auto written = std::filesystem::last_write_time(Path());
  bool seen = false;
  while (!seen) {  // the file system's clock may not have moved since it was made
    std::ofstream(Path()) << "trainer " << kAdmin << "\nadmin " << kTrainer << "\n";
    std::filesystem::last_write_time(Path(), written);
    struct stat status {};
    ASSERT_EQ(stat(Path().c_str(), &status), 0);
    seen = status.st_ctim.tv_sec != made_.tv_sec || status.st_ctim.tv_nsec != made_.tv_nsec;
  }
  EXPECT_TRUE(access_->Poll().has_value());
}

}  // namespace
}  // namespace lossd::rpc::access_test
