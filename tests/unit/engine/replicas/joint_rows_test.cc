#include "server/engine/head/replica/joint_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

namespace lossd::engine::joint_rows_test {
namespace {

using kernels::RowSpan;
using ::testing::HasSubstr;

constexpr int64_t kRowBytes = 8;

// Six rows over three replicas, of which each says so many bytes more than it was asked for.
struct Answered {
  absl::Status status;
  int64_t rows = 0;  // that were taken before
};
Answered ReadFrom(int32_t odd_replica, int64_t more) {
  Answered answered;
  ReadJointRows(
      {.slices = {{{0, 2}}, {{2, 2}}, {{4, 2}}},
       .rows = {.tensor = "", .rows = {0, 6}},
       .row_bytes = kRowBytes,
       .read =
           [&](int32_t replica, const PartRows& piece,
               const std::function<void(absl::StatusOr<std::string>)>& done) {
             const int64_t bytes = piece.rows.count * kRowBytes + (replica == odd_replica ? more : 0);
             done(std::string(static_cast<size_t>(bytes), 'x'));
           }},
      [&](const RowSpan& piece, const std::string& /*bytes*/) { answered.rows += piece.count; },
      [&](absl::Status status) { answered.status = std::move(status); });
  return answered;
}

TEST(JointRows, AllRowsAreRead) {
  const Answered answered = ReadFrom(1, 0);
  EXPECT_TRUE(answered.status.ok()) << answered.status;
  EXPECT_EQ(answered.rows, 6);
}

TEST(JointRows, BytesOfAnotherSizeThanWasAskedForAreNotTaken) {
  for (const int64_t more : {-1, 1, -16, 8}) {
    const Answered answered = ReadFrom(1, more);
    EXPECT_EQ(answered.status.code(), absl::StatusCode::kInternal) << answered.status << ", " << more;
    EXPECT_THAT(answered.status.message(), HasSubstr("replica 1"));
    EXPECT_EQ(answered.rows, 2) << "those of the replica before it";
  }
}

}  // namespace
}  // namespace lossd::engine::joint_rows_test
