// Which device a name stands for.
#include "server/engine/device/device_factory.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace lossd::engine::device_factory_test {
namespace {

DeviceOptions Named(std::string name) {
  DeviceOptions options;
  options.name = std::move(name);
  options.workspace_bytes = 1 << 20;
  return options;
}

TEST(DeviceFactoryTest, KnowsTheNamesOfEveryKind) {
  for (const char* name : {"auto", "cpu", "cuda:0", "cuda:12"}) EXPECT_TRUE(IsDeviceName(name)) << name;
  for (const char* name : {"", "gpu", "cpu:0", "cuda", "cuda:", "cuda:-1", "cuda:1x", "cuda:1000"}) {
    EXPECT_FALSE(IsDeviceName(name)) << name;
  }
}

TEST(DeviceFactoryTest, RefusesANameThatNoKindKnows) {
  const auto chosen = CreateDevice(Named("gpu"));
  EXPECT_EQ(chosen.status().code(), absl::StatusCode::kInvalidArgument) << chosen.status();
}

TEST(DeviceFactoryTest, NamesTheDeviceThatIsNotThere) {
  const auto chosen = CreateDevice(Named("cuda:999"));
  EXPECT_EQ(chosen.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(chosen.status().message().find("cuda:999"), std::string::npos) << chosen.status();
}

TEST(DeviceFactoryTest, AutoTakesTheCpuWhereThereIsNothingBetterAndSaysWhy) {
  const auto gpu = CreateDevice(Named("cuda:0"));
  const auto chosen = CreateDevice(Named("auto"));
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_NE(chosen->device, nullptr);
  EXPECT_EQ(chosen->why_cpu, gpu.ok() ? "" : gpu.status().message());
}

}  // namespace
}  // namespace lossd::engine::device_factory_test
