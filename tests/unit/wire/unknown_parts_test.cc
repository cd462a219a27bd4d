// What a newer program put into a message, wherever it lies in it.
#include "proto/wire/unknown_parts.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "proto/wire/compute_wire.h"
#include "tests/unit/wire/wire_bytes.h"

namespace lossd::wire::unknown_parts_test {
namespace {

using google::protobuf::Message;

void AddField(Message* message, int number) {
  message->GetReflection()->MutableUnknownFields(message)->AddVarint(number, 1);
}

v1::ComputeRequest FullRequest() {
  v1::ComputeRequest request;
  v1::Chunk& chunk = *request.mutable_chunk();
  chunk.set_sequence(3);
  chunk.set_hidden_dtype(v1::DATA_TYPE_BFLOAT16);
  chunk.mutable_options()->set_label_smoothing(0.5F);
  chunk.mutable_options()->mutable_returns()->set_top_k(2);
  chunk.mutable_options()->mutable_distillation()->set_divergence(v1::DIVERGENCE_REVERSE_KL);
  chunk.mutable_token_inputs()->set_weights("1234");
  chunk.set_labels(std::string(8, 'l'));
  chunk.set_hidden_states(std::string(16, 'h'));
  return request;
}

TEST(UnknownParts, NoneInWhatIsKnown) {
  EXPECT_FALSE(FindUnknownPart(FullRequest()).has_value());
  EXPECT_FALSE(FindUnknownPart(v1::ComputeRequest()).has_value());
}

TEST(UnknownParts, AFieldIsNamedByItsNumberItsMessageAndItsPlace) {
  v1::ComputeRequest request = FullRequest();
  AddField(request.mutable_chunk()->mutable_options()->mutable_distillation(), 77);
  const std::optional<UnknownPart> found = FindUnknownPart(request);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->message, v1::Distillation::descriptor());
  EXPECT_EQ(found->field, 77);
  EXPECT_EQ(found->path, "chunk.options.distillation.77");
  EXPECT_EQ(found->enumeration, nullptr);
}

TEST(UnknownParts, AFieldOfRepeatedMessages) {
  v1::BeginFlushRequest request;
  request.add_marks()->add_lanes();
  request.add_marks()->add_lanes();
  AddField(request.mutable_marks(1)->mutable_lanes(0), 9);
  const std::optional<UnknownPart> found = FindUnknownPart(request);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->path, "marks[1].lanes[0].9");
  EXPECT_EQ(found->message, v1::LaneMarks::descriptor());
}

TEST(UnknownParts, AFieldThatIsKnownAsAnotherType) {
  v1::HeadConfig config;
  ASSERT_TRUE(config.ParseFromString(std::string("\x08\x01", 2)));  // name, a string, as a number
  const std::optional<UnknownPart> found = FindUnknownPart(config);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->field, v1::HeadConfig::kNameFieldNumber);
}

TEST(UnknownParts, AValueThatAnEnumDoesNotHave) {
  v1::CreateHeadRequest request;
  request.mutable_config()->mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(99));
  const std::optional<UnknownPart> found = FindUnknownPart(request);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->message, v1::Optimizer::descriptor());
  EXPECT_EQ(found->field, v1::Optimizer::kKindFieldNumber);
  EXPECT_EQ(found->path, "config.optimizer.kind");
  EXPECT_EQ(found->enumeration, v1::OptimizerKind_descriptor());
  EXPECT_EQ(found->value, 99);
}

// The reader that does not copy leaves none of them out, in its own way and where the generated parser takes
// over.
TEST(UnknownParts, WhatTheReaderOfChunksPassesOn) {
  v1::ComputeRequest of_chunk = FullRequest();
  AddField(of_chunk.mutable_chunk(), 1000);
  v1::ComputeRequest of_options = FullRequest();
  AddField(of_options.mutable_chunk()->mutable_options(), 1000);
  v1::ComputeRequest of_request = FullRequest();
  AddField(&of_request, 1000);
  for (const v1::ComputeRequest& request : {of_chunk, of_options, of_request}) {
    for (const size_t slice : {size_t{1}, size_t{5}, size_t{4096}}) {
      grpc::ByteBuffer bytes = InSlices(request.SerializeAsString(), slice);
      ReceivedRequest received;
      ASSERT_TRUE(Decode(&bytes, &received));
      const std::optional<UnknownPart> found = FindUnknownPart(received.message);
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->field, 1000);
    }
  }
}

}  // namespace
}  // namespace lossd::wire::unknown_parts_test
