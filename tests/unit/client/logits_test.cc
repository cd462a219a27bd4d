// Head::Logits: what is refused before anything is sent.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "tests/unit/client/fake_server.h"

namespace lossd {
namespace {

using testing::FakeServer;
using ::testing::HasSubstr;

TEST(LogitsTest, MoreElementsThanAnyArrayHasAreRefused) {
  FakeServer fake;
  const auto client = Client::Connect(fake.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto head = (*client)->GetHead(FakeServer::kName);
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<float> hidden(FakeServer::kHidden);
  std::vector<int32_t> tokens(8);  // as many as the product would be, had it come round to 8 again
  const int64_t rows = std::numeric_limits<int64_t>::max() / 4 + 2;
  const auto version =
      head->Logits({.rows = rows, .hidden_states = hidden.data()}, {.top_k = 8, .top_tokens = tokens});
  EXPECT_EQ(version.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(version.status().message()), HasSubstr("rows is 2305843009213693953 and top_k 8"));
}

}  // namespace
}  // namespace lossd
