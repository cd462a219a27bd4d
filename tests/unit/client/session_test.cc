// lossd::Session: what of a batch travels, and how much of it at once.
#include <gtest/gtest.h>

#include <cstdint>

#include "lossd/client.h"
#include "lossd/v1/loss.pb.h"
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

TEST_F(SessionTest, DxThatNobodyWantsIsNotAskedFor) {
  Session session = Open();
  Data data(6);
  BatchOutputs outputs = data.outputs();
  outputs.dx = nullptr;
  ASSERT_TRUE(session.Compute(data.batch(), outputs).ok());
  EXPECT_EQ(fake_.observed().chunks.back().mode(), v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  EXPECT_EQ(fake_.observed().chunks.back().mode(), v1::COMPUTE_MODE_LOSS_AND_GRADIENTS);
}

}  // namespace
}  // namespace lossd::session_test
