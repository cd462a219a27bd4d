// With a libnvidia-ml of the test's own, fake_nvml.cc.
#include "server/telemetry/metrics/gpu_sensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "server/telemetry/metrics/collect.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::telemetry::gpu_sensors_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kAddress[] = "00000000:1b:00.0";

TEST(GpuSensorsTest, ReadsWhatTheLibrarySays) {
  // One after the other: each ends its use of the library.
  for (int i = 0; i < 2; ++i) {
    const std::unique_ptr<GpuSensors> sensors = GpuSensors::Open(kAddress, LOSSD_FAKE_NVML);
    ASSERT_NE(sensors, nullptr);
    const GpuReadings readings = sensors->Read();
    EXPECT_EQ(readings.utilization, 0.87);
    EXPECT_EQ(readings.power_watts, 412.5);
    EXPECT_EQ(readings.temperature_celsius, 61);
  }
}

TEST(GpuSensorsTest, AreNotThereWithoutLibraryOrGpu) {
  EXPECT_EQ(GpuSensors::Open(kAddress, "libno-such-library.so.1"), nullptr);
  EXPECT_EQ(GpuSensors::Open("00000000:2c:00.0", LOSSD_FAKE_NVML), nullptr);
  EXPECT_EQ(GpuSensors::Open("", LOSSD_FAKE_NVML), nullptr) << "a device that is no GPU";
  EXPECT_EQ(GpuSensors::Open(kAddress, "libm.so.6"), nullptr) << "a library that is not NVML";
}

TEST(GpuSensorsTest, WhatTheGpuDoesNotTellIsNoMetric) {
  const std::unique_ptr<GpuSensors> sensors = GpuSensors::Open(kAddress, LOSSD_FAKE_NVML);
  ASSERT_NE(sensors, nullptr);
  ASSERT_EQ(setenv("LOSSD_FAKE_NVML_NO_POWER", "1", 1), 0);
  const GpuReadings readings = sensors->Read();
  ASSERT_EQ(unsetenv("LOSSD_FAKE_NVML_NO_POWER"), 0);
  EXPECT_FALSE(readings.power_watts.has_value());
  EXPECT_TRUE(readings.temperature_celsius.has_value());
}

class GpuMetricsTest : public ::testing::Test, protected engine::EngineFixture {};

TEST_F(GpuMetricsTest, AreAmongTheOthersWhereThereIsAGpu) {
  const ServiceCounters counters({});
  GpusSensors sensors;
  sensors.push_back(GpuSensors::Open(kAddress, LOSSD_FAKE_NVML));
  const std::string text = MetricsText(*engine, counters, sensors);
  EXPECT_THAT(text, HasSubstr("\nlossd_gpu_utilization_ratio 0.87\n"));
  EXPECT_THAT(text, HasSubstr("\nlossd_gpu_power_watts 412.5\n"));
  EXPECT_THAT(text, HasSubstr("\nlossd_gpu_temperature_celsius 61\n"));
  EXPECT_THAT(MetricsText(*engine, counters), Not(HasSubstr("lossd_gpu_")));
}

TEST(GpuMetricsOfRanks, AreOfThoseThatHaveAGpu) {
  engine::GroupReport group;
  group.ranks.resize(2);
  GpusSensors sensors;
  sensors.push_back(nullptr);
  sensors.push_back(GpuSensors::Open(kAddress, LOSSD_FAKE_NVML));
  Exposition out;
  CollectGpus(sensors, group, out);
  const auto families = out.Take();
  ASSERT_EQ(families.size(), 3u);
  for (const auto& family : families) {
    ASSERT_EQ(family.metric.size(), 1u) << family.name;
    ASSERT_EQ(family.metric[0].label.size(), 1u);
    EXPECT_EQ(family.metric[0].label[0].name, "rank");
    EXPECT_EQ(family.metric[0].label[0].value, "1");
  }
}

}  // namespace
}  // namespace lossd::telemetry::gpu_sensors_test
