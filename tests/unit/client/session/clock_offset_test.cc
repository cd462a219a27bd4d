#include "client/src/session/clock_offset.h"

#include <gtest/gtest.h>

namespace lossd::internal::clock_offset_test {
namespace {

TEST(ClockOffsetTest, ClocksThatMayAgreeAreTakenToAgree) {
  ClockOffset offset;
  offset.NoteToServer(1000, 1300);
  offset.NoteFromServer(2000, 2100);
  EXPECT_EQ(offset.value(), 0);
  EXPECT_EQ(offset.error(), 300);
}

TEST(ClockOffsetTest, OtherClocksAreTakenToBeInTheMiddleOfWhatIsPossible) {
  ClockOffset offset;                 // theirs is 5000 ahead
  offset.NoteToServer(1000, 6400);    // 400 on the way
  offset.NoteFromServer(8000, 3200);  // 200
  EXPECT_EQ(offset.value(), 5100);
  EXPECT_EQ(offset.error(), 300);
}

TEST(ClockOffsetTest, FasterMessagesMakeItBetterKnown) {
  ClockOffset offset;
  offset.NoteToServer(1000, 6400);
  offset.NoteFromServer(8000, 3200);
  offset.NoteToServer(4000, 9050);
  offset.NoteToServer(5000, 10900);  // a slow one teaches nothing
  EXPECT_EQ(offset.value(), 4925);
  EXPECT_EQ(offset.error(), 125);
}

TEST(ClockOffsetTest, AClockThatWasSetIsFollowed) {
  ClockOffset offset;
  offset.NoteToServer(1000, 6400);
  offset.NoteFromServer(8000, 3200);
  offset.NoteToServer(10000, 10100);  // theirs went back
  offset.NoteFromServer(11000, 11080);
  EXPECT_EQ(offset.value(), 0);
  EXPECT_EQ(offset.error(), 100);
}

}  // namespace
}  // namespace lossd::internal::clock_offset_test
