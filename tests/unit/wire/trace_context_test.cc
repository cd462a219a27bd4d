#include "proto/wire/trace_context.h"

#include <gtest/gtest.h>

#include <string>

namespace lossd::wire::trace_context_test {
namespace {

constexpr char kTraceId[] = "4bf92f3577b34da6a3ce929d0e0e4736";
const std::string kParent = std::string("00-") + kTraceId + "-00f067aa0ba902b7-01";

TEST(TraceContextTest, TheTraceIdIsRead) {
  EXPECT_EQ(TraceIdOf(kParent), kTraceId);
  EXPECT_EQ(TraceIdOf(std::string("00-") + kTraceId + "-00f067aa0ba902b7-ff"), kTraceId);
}

TEST(TraceContextTest, VersionsToComeAreReadAsFarAsTheyAreKnown) {
  const std::string later = "cc" + kParent.substr(2);
  EXPECT_EQ(TraceIdOf(later), kTraceId);
  EXPECT_EQ(TraceIdOf(later + "-what-is-to-come"), kTraceId);
  EXPECT_EQ(TraceIdOf(later + ".what"), "");
  EXPECT_EQ(TraceIdOf(later + "-\n"), "");
  EXPECT_EQ(TraceIdOf(kParent + "-more"), "");  // version 00 is of one length
}

TEST(TraceContextTest, WhatIsNotATraceParentHasNoTraceId) {
  EXPECT_EQ(TraceIdOf(""), "");
  EXPECT_EQ(TraceIdOf("ff" + kParent.substr(2)), "");
  EXPECT_EQ(TraceIdOf(" " + kParent), "");
  EXPECT_EQ(TraceIdOf(kParent + " "), "");
  EXPECT_EQ(TraceIdOf(std::string("00-") + std::string(32, '0') + "-00f067aa0ba902b7-01"), "");
  EXPECT_EQ(TraceIdOf(std::string("00-") + kTraceId + "-0000000000000000-01"), "");
  for (size_t i = 0; i < kParent.size(); ++i) {
    EXPECT_EQ(TraceIdOf(kParent.substr(0, i)), "") << i;
    for (const char wrong : {'\0', 'A', 'g', '_', '\xff'}) {
      std::string changed = kParent;
      changed[i] = wrong;
      EXPECT_EQ(TraceIdOf(changed), "") << i << " " << static_cast<int>(wrong);
    }
  }
}

TEST(TraceContextTest, ATraceStateIsShortAndPrintable) {
  EXPECT_TRUE(IsTraceState("congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"));
  EXPECT_TRUE(IsTraceState(std::string(kMaxTraceState, 'a')));
  EXPECT_FALSE(IsTraceState(""));
  EXPECT_FALSE(IsTraceState(std::string(kMaxTraceState + 1, 'a')));
  EXPECT_FALSE(IsTraceState("a=\n"));
  EXPECT_FALSE(IsTraceState("a=\xc3\xa9"));
}

}  // namespace
}  // namespace lossd::wire::trace_context_test
