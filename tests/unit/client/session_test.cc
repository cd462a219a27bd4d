// lossd::Session: how much of a batch is under way at once.
#include <gtest/gtest.h>

#include <cstdint>

#include "lossd/client.h"
#include "tests/unit/client/session_data.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_test {
namespace {

using testing::Data;
using testing::kHidden;
using testing::kTokensPerChunk;
using testing::SessionTest;

TEST_F(SessionTest, OutstandingPayloadStaysWithinTheCredit) {
  constexpr int64_t kPayload = kTokensPerChunk * (8 + 4 + 2 * kHidden * 4);  // of one chunk, in and out
  fake_.limits.set_byte_credit(3 * kPayload + 5);
  fake_.hold_answers_until_chunks = 40;
  Session session = Open();
  Data data(80);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  // The fake answers only when nothing more would fit: less than three chunks and it would still wait.
  EXPECT_EQ(fake_.observed().peak_outstanding_bytes, 3 * kPayload);
}

}  // namespace
}  // namespace lossd::session_test
