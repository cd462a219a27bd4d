#include "server/rpc/lanes/relay_wire.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "lossd/group/v1/relay.pb.h"
#include "server/engine/common/errors.h"
#include "server/rpc/convert/wire.h"

namespace lossd::rpc::relay_wire_test {
namespace {

v1::ComputeRequest Chunk() {
  v1::ComputeRequest request;
  request.mutable_chunk()->set_sequence(7);
  request.mutable_chunk()->set_tokens(2);
  request.mutable_chunk()->set_labels(std::string(16, '\1'));
  return request;
}

constexpr engine::HeldTensors kHeld = {.rank = 0,
                                       .number = 5,
                                       .hidden_bytes = 64,
                                       .teacher_bytes = 32,
                                       .non_finite = 3,
                                       .teacher_non_finite = 16};

TEST(RelayWireTest, WhatIsWrittenIsReadAgain) {
  const RelayId id{.epoch = 3, .rank = 2, .relay = 9, .peer = "ipv4:10.0.0.1:5"};
  for (const bool first : {true, false}) {
    grpc::ByteBuffer bytes = WriteRelayed(first ? std::optional(id) : std::nullopt, Chunk(), kHeld);
    RelayedRequest relayed;
    ASSERT_TRUE(ParseRelayed(&bytes, &relayed).ok());
    EXPECT_EQ(relayed.hello.has_value(), first);
    if (first) {
      EXPECT_EQ(*relayed.hello, id);
    }
    EXPECT_EQ(relayed.request.message.chunk().sequence(), 7U);
    EXPECT_EQ(relayed.request.small.bytes, 16);
    EXPECT_EQ(relayed.held.number, 5U);
    EXPECT_EQ(relayed.held.hidden_bytes, 64);
    EXPECT_EQ(relayed.held.teacher_bytes, 32);
    EXPECT_EQ(relayed.held.non_finite, 3);
    EXPECT_EQ(relayed.held.teacher_non_finite, 16);
  }
}

absl::Status Parsed(const std::function<void(group::v1::RelayRequest&)>& spoil) {
  grpc::ByteBuffer bytes = WriteRelayed(RelayId{1, 1, 1, ""}, Chunk(), kHeld);
  group::v1::RelayRequest message;
  EXPECT_TRUE(Parse(&bytes, &message).ok());
  spoil(message);
  bytes = Serialize(message);
  RelayedRequest relayed;
  return ParseRelayed(&bytes, &relayed);
}

TEST(RelayWireTest, WhatNoRankWritesIsRefused) {
  EXPECT_TRUE(Parsed([](auto& /*message*/) {}).ok());
  for (const auto& spoil : std::initializer_list<std::function<void(group::v1::RelayRequest&)>>{
           [](auto& message) { message.set_request("\xff"); }, [](auto& message) { message.set_payload(0); },
           [](auto& message) { message.clear_request(); },
           [](auto& message) {
             v1::ComputeRequest start;
             start.mutable_start()->set_lane(1);
             message.set_request(start.SerializeAsString());
           },
           [](auto& message) {
             v1::ComputeRequest chunk = Chunk();
             chunk.mutable_chunk()->set_hidden_states("xy");
             message.set_request(chunk.SerializeAsString());
           },
           [](auto& message) {
             v1::ComputeRequest chunk = Chunk();
             chunk.mutable_chunk()->set_teacher_hidden_states("xy");
             message.set_request(chunk.SerializeAsString());
           },
           [](auto& message) { message.mutable_hidden_states()->set_bytes(-1); },
           [](auto& message) { message.mutable_hidden_states()->set_non_finite(-1); },
           [](auto& message) { message.mutable_teacher_hidden_states()->set_non_finite(17); }}) {
    const absl::Status refused = Parsed(spoil);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_EQ(engine::ReasonOf(refused), engine::RejectReason::kMalformed) << refused;
  }
}

}  // namespace
}  // namespace lossd::rpc::relay_wire_test
