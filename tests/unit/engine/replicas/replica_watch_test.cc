#include "server/engine/replicas/replica_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace lossd::engine::replica_watch_test {
namespace {

using ::testing::DoubleNear;
using ::testing::IsEmpty;

constexpr auto kSeal = static_cast<size_t>(ReplicaPhase::kSeal);

template <class Reading>
uint64_t Count(const Reading& reading) {
  uint64_t count = 0;
  for (size_t i = 0; i <= Reading::kBounds.size(); ++i) count += reading.bucket(i);
  return count;
}

TEST(ReplicaWatch, NamesWhoAnswersLate) {
  ReplicaWatch watch({.replica = 0, .replicas = 3});
  for (int round = 0; round < 4; ++round) {
    watch.NoteAnswers(ReplicaPhase::kSeal,
                      {absl::Milliseconds(5), absl::Milliseconds(2), absl::Milliseconds(42)});
  }
  const ReplicaReport report = watch.Read();
  ASSERT_EQ(report.replicas.size(), 3U);
  EXPECT_THAT(report.replicas[0].late_seconds[kSeal], DoubleNear(0.003, 1e-9));
  EXPECT_EQ(report.replicas[1].late_seconds[kSeal], 0) << "it was the first";
  EXPECT_THAT(report.replicas[2].late_seconds[kSeal], DoubleNear(0.040, 1e-9));
  EXPECT_THAT(report.replicas[2].late[kSeal].sum(), DoubleNear(0.160, 1e-9));
  EXPECT_EQ(Count(report.replicas[2].late[kSeal]), 4U);
}

TEST(ReplicaWatch, HowLateOneWasLongAgoIsForgotten) {
  ReplicaWatch watch({.replica = 0, .replicas = 2});
  for (int round = 0; round < 10; ++round) {
    watch.NoteAnswers(ReplicaPhase::kSeal, {absl::ZeroDuration(), absl::Seconds(1)});
  }
  for (int round = 0; round < 100; ++round) {
    watch.NoteAnswers(ReplicaPhase::kSeal, {absl::Milliseconds(10), absl::ZeroDuration()});
  }
  const ReplicaReport report = watch.Read();
  EXPECT_THAT(report.replicas[0].late_seconds[kSeal], DoubleNear(0.010, 1e-4));
  EXPECT_THAT(report.replicas[1].late_seconds[kSeal], DoubleNear(0, 1e-4));
}

TEST(ReplicaWatch, TheOthersAreTheCoordinatorsToWatch) {
  ReplicaWatch watch({.replica = 1, .replicas = 3});
  watch.NotePhase(ReplicaPhase::kStep, absl::Milliseconds(7));
  watch.NotePlaced(2);
  const ReplicaReport report = watch.Read();
  EXPECT_THAT(report.replicas, IsEmpty());
  EXPECT_EQ(Count(report.phases[static_cast<size_t>(ReplicaPhase::kStep)]), 1U);
  EXPECT_TRUE(report.IsSet());
  EXPECT_FALSE(ReplicaWatch({}).Read().IsSet());
}

TEST(ReplicaWatch, IsWholeOnceSaidSo) {
  ReplicaWatch watch({.replica = 0, .replicas = 2});
  EXPECT_FALSE(watch.Read().whole.ok());
  watch.NoteMeeting(17);
  watch.NoteWhole(absl::OkStatus());
  EXPECT_TRUE(watch.Read().whole.ok());
  EXPECT_EQ(watch.Read().history, 17U);
  EXPECT_EQ(watch.Read().epochs, 1U);
}

}  // namespace
}  // namespace lossd::engine::replica_watch_test
