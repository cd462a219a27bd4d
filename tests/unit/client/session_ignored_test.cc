// lossd::Session and ignored tokens: they are not sent, also when a stream breaks.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::session_ignored_test {
namespace {

using testing::Data;
using testing::Fate;
using testing::kHidden;
using testing::SessionTest;

constexpr int64_t kIgnored = -100;

class SessionIgnoredTest : public SessionTest {};

// Ignored tokens of `data` at some places.
void Ignore(Data* data, unsigned seed, unsigned one_in) {
  std::mt19937 random(seed);
  for (int64_t& label : data->labels) {
    if (random() % one_in == 0) label = kIgnored;
  }
}

void ExpectOutputs(const Data& data) {
  for (size_t i = 0; i < data.labels.size(); ++i) {
    if (data.labels[i] != kIgnored) {
      data.ExpectOutputs(i, i + 1);
      continue;
    }
    EXPECT_EQ(data.losses[i], 0) << "token " << i;
    for (size_t j = 0; j < kHidden; ++j) EXPECT_EQ(data.dx[i * kHidden + j], 0) << "token " << i;
  }
}

TEST_F(SessionIgnoredTest, ACutStreamSendsTheSameTokensAgain) {
  Session session = Open();
  for (const Fate fate : {Fate::kCutBeforeTaking, Fate::kCutBeforeAnswer, Fate::kCutAfterAnswer}) {
    const uint64_t accepted = session.marks().lanes[0].accepted;
    Script(accepted + 2, fate);
    Data data(11, 3);
    Ignore(&data, 7, 3);
    const auto result = session.Compute(data.batch(), data.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->valid_tokens, CountValid(data.labels));
    ExpectOutputs(data);
  }
}

}  // namespace
}  // namespace lossd::session_ignored_test
