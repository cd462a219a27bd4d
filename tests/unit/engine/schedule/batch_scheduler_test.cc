// Whose thread runs the device's loop.
#include "server/engine/schedule/batch_scheduler.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/unit/engine/fake_device.h"

namespace lossd::engine::batch_scheduler_test {
namespace {

class BatchSchedulerTest : public ::testing::TestWithParam<DeviceLoop> {
 protected:
  FakeGate gate_;
  const std::unique_ptr<Device> device_ = MakeFakeDevice(&gate_);
  BatchScheduler scheduler_{device_.get(), absl::ZeroDuration(), GetParam()};
};

TEST_P(BatchSchedulerTest, FlushWaitsForTasks) {
  int ran = 0;
  for (int i = 0; i < 3; ++i) scheduler_.Post(nullptr, [&ran] { ++ran; });
  scheduler_.Flush();
  EXPECT_EQ(ran, 3);
}

TEST_P(BatchSchedulerTest, TasksRunInTheThreadOfTheLoop) {
  std::thread::id ran_in;
  scheduler_.Post(nullptr, [&ran_in] { ran_in = std::this_thread::get_id(); });
  scheduler_.Flush();
  EXPECT_EQ(ran_in == std::this_thread::get_id(), GetParam() == DeviceLoop::kByCaller);
}

INSTANTIATE_TEST_SUITE_P(Loops, BatchSchedulerTest,
                         ::testing::Values(DeviceLoop::kOwnThread, DeviceLoop::kByCaller));

TEST(SteppedBatchSchedulerTest, NothingHappensButByStep) {
  FakeGate gate;
  const std::unique_ptr<Device> device = MakeFakeDevice(&gate);
  BatchScheduler scheduler(device.get(), absl::ZeroDuration(), DeviceLoop::kByCaller);
  int ran = 0;
  scheduler.Post(nullptr, [&ran] { ++ran; });
  scheduler.Post(nullptr, [&ran] { ++ran; });
  EXPECT_EQ(ran, 0);
  scheduler.Step();
  EXPECT_EQ(ran, 1);
  scheduler.Step();
  EXPECT_EQ(ran, 2);
}

}  // namespace
}  // namespace lossd::engine::batch_scheduler_test
