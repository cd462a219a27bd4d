#include "server/engine/replicas/replica_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace lossd::engine::replica_watch_test {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kSeal = static_cast<size_t>(ReplicaPhase::kSeal);

template <class Reading>
uint64_t Count(const Reading& reading) {
  uint64_t count = 0;
  for (size_t i = 0; i <= Reading::kBounds.size(); ++i) count += reading.bucket(i);
  return count;
}

const absl::Time kAsked = absl::UnixEpoch() + absl::Hours(1);

// All are asked, and each answers so long afterwards.
void Ask(ReplicaWatch& watch, const std::vector<absl::Duration>& taken) {
  const auto asked = watch.NoteAsked(ReplicaPhase::kSeal, kAsked);
  std::vector<size_t> order(taken.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&taken](size_t a, size_t b) { return taken[a] < taken[b]; });
  for (const size_t replica : order) {
    watch.NoteAnswer(*asked, replica, ReplicaWatch::Answer::kDone, kAsked + taken[replica]);
  }
}

TEST(ReplicaWatch, NamesWhoAnswersLate) {
  ReplicaWatch watch({.replica = 0, .replicas = 3});
  for (int round = 0; round < 4; ++round) {
    Ask(watch, {absl::Milliseconds(5), absl::Milliseconds(2), absl::Milliseconds(42)});
  }
  const ReplicaReport report = watch.Read();
  ASSERT_EQ(report.replicas.size(), 3U);
  EXPECT_THAT(report.replicas[0].late_seconds[kSeal], DoubleNear(0.003, 1e-9));
  EXPECT_EQ(report.replicas[1].late_seconds[kSeal], 0) << "it was the first";
  EXPECT_THAT(report.replicas[2].late_seconds[kSeal], DoubleNear(0.040, 1e-9));
  EXPECT_THAT(report.replicas[2].late[kSeal].sum(), DoubleNear(0.160, 1e-9));
  EXPECT_EQ(Count(report.replicas[2].late[kSeal]), 4U);
  EXPECT_THAT(report.phases[kSeal].sum(), DoubleNear(0.020, 1e-9)) << "of this one itself";
}

TEST(ReplicaWatch, NamesWhoDoesNotAnswer) {
  ReplicaWatch watch({.replica = 0, .replicas = 3});
  watch.NoteWhole(absl::OkStatus());
  Ask(watch, {absl::ZeroDuration(), absl::ZeroDuration(), absl::Seconds(1)});
  const auto asked = watch.NoteAsked(ReplicaPhase::kSeal, kAsked);
  EXPECT_EQ(watch.Read(kAsked + absl::Seconds(41)).WhyNot(),
            "replicas 0, 1, 2 have not answered a seal for 41 s");
  EXPECT_EQ(watch.Read(kAsked + absl::Seconds(41)).replicas[2].late_seconds[kSeal], 1) << "nobody is late";
  for (const size_t replica : {0, 1}) {
    watch.NoteAnswer(*asked, replica, ReplicaWatch::Answer::kDone, kAsked + absl::Seconds(2));
  }
  const ReplicaReport soon = watch.Read(kAsked + absl::Seconds(3));
  EXPECT_EQ(soon.WhyNot(), "") << "that may be";
  EXPECT_EQ(soon.replicas[2].late_seconds[kSeal], 1);
  const ReplicaReport report = watch.Read(kAsked + absl::Seconds(41));
  EXPECT_EQ(report.WhyNot(), "replica 2 has not answered a seal for 41 s");
  EXPECT_EQ(report.replicas[2].late_seconds[kSeal], 39);
  EXPECT_EQ(report.replicas[2].late[kSeal].sum(), 40);
  EXPECT_EQ(Count(report.replicas[2].late[kSeal]), 1U);
  EXPECT_EQ(report.replicas[1].late_seconds[kSeal], 0);
  watch.NoteAnswer(*asked, 2, ReplicaWatch::Answer::kDone, kAsked + absl::Seconds(42));
  const ReplicaReport after = watch.Read(kAsked + absl::Seconds(50));
  EXPECT_EQ(after.WhyNot(), "");
  EXPECT_EQ(after.replicas[2].late[kSeal].sum(), 41);
}

TEST(ReplicaWatch, KnowsForHowLongAllWaitForEachOther) {
  ReplicaWatch watch({.replica = 0, .replicas = 2});
  const auto unanswered = [&watch](absl::Duration later) {
    const ReplicaReport report = watch.Read(kAsked + later);
    return std::vector<double>{report.replicas[0].unanswered_seconds, report.replicas[1].unanswered_seconds};
  };
  EXPECT_THAT(unanswered(absl::Seconds(9)), ElementsAre(0, 0));
  const auto sum = watch.NoteAsked(ReplicaPhase::kSum, kAsked);
  const auto seal = watch.NoteAsked(ReplicaPhase::kSeal, kAsked + absl::Seconds(30));  // of another head
  EXPECT_THAT(unanswered(absl::Seconds(70)), ElementsAre(70, 70)) << "what was asked first";
  watch.NoteAnswer(*sum, 1, ReplicaWatch::Answer::kDone, kAsked + absl::Seconds(75));
  EXPECT_THAT(unanswered(absl::Seconds(80)), ElementsAre(80, 50));
  for (const size_t replica : {0, 1}) {
    watch.NoteAnswer(*seal, replica, ReplicaWatch::Answer::kDone, kAsked + absl::Seconds(81));
  }
  EXPECT_THAT(unanswered(absl::Seconds(90)), ElementsAre(90, 0));
}

TEST(ReplicaWatch, TheTimeThatOthersHaveWaitedForOneThatIsLostStays) {
  ReplicaWatch watch({.replica = 0, .replicas = 3});
  const auto asked = watch.NoteAsked(ReplicaPhase::kSeal, kAsked);
  watch.NoteAnswer(*asked, 1, ReplicaWatch::Answer::kError, kAsked);  // has refused it at once
  watch.NoteAnswer(*asked, 0, ReplicaWatch::Answer::kDone, kAsked + absl::Seconds(1));
  EXPECT_EQ(watch.Read(kAsked + absl::Seconds(10)).replicas[2].late[kSeal].sum(), 9);
  watch.NoteAnswer(*asked, 2, ReplicaWatch::Answer::kError, kAsked + absl::Seconds(11));
  EXPECT_EQ(watch.Read(kAsked + absl::Seconds(20)).replicas[2].late[kSeal].sum(), 10);
}

TEST(ReplicaWatch, WhatNobodyIsAskedForAnyMoreIsNotUnderWay) {
  ReplicaWatch watch({.replica = 0, .replicas = 2});
  watch.NoteWhole(absl::OkStatus());
  (void)watch.NoteAsked(ReplicaPhase::kStep, kAsked);
  EXPECT_EQ(watch.Read(kAsked + absl::Seconds(41)).WhyNot(), "");
}

TEST(ReplicaWatch, HowLateOneWasLongAgoIsForgotten) {
  ReplicaWatch watch({.replica = 0, .replicas = 2});
  for (int round = 0; round < 10; ++round) {
    Ask(watch, {absl::ZeroDuration(), absl::Seconds(1)});
  }
  for (int round = 0; round < 100; ++round) {
    Ask(watch, {absl::Milliseconds(10), absl::ZeroDuration()});
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
