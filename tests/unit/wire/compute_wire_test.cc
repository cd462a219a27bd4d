// Our bytes of Compute messages against the generated classes', both ways.
#include "proto/wire/compute_wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "tests/unit/wire/wire_bytes.h"

namespace lossd::wire::compute_wire_test {
namespace {

std::string Pattern(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 31 + 7);
  return text;
}

// Every field but the tensors.
v1::Chunk FullChunk() {
  v1::Chunk chunk;
  chunk.set_sequence(0xffffffffffffffff);
  chunk.set_generation(300);
  chunk.set_first_token(int64_t{1} << 40);
  chunk.set_tokens(17);
  chunk.set_hidden_dtype(v1::DATA_TYPE_BFLOAT16);
  chunk.set_dx_dtype(v1::DATA_TYPE_FLOAT16);
  chunk.set_mode(v1::COMPUTE_MODE_LOSS_ONLY);
  chunk.set_ignore_index(-100);
  chunk.set_gradient_scale(0);  // explicitly present
  chunk.mutable_options()->set_label_smoothing(0.1f);
  chunk.mutable_options()->set_softcap(0);  // explicitly present
  chunk.mutable_options()->mutable_returns()->set_top_k(5);
  chunk.mutable_options()->mutable_distillation()->set_teacher("large");
  chunk.mutable_token_inputs()->set_weights(Pattern(68));
  return chunk;
}

v1::ChunkResult FullResult() {
  v1::ChunkResult result;
  result.set_sequence(5);
  result.set_disposition(v1::DISPOSITION_REJECTED);
  result.mutable_error()->set_code(3);
  result.mutable_error()->set_message("labels[0] is 9");
  result.mutable_error()->set_field("labels");
  result.set_first_token(4096);
  result.set_tokens(2);
  result.set_valid_tokens(1);
  result.set_loss_sum(1.25);
  result.set_weight_version(9);
  result.set_dx_dtype(v1::DATA_TYPE_FLOAT32);
  result.mutable_returns()->set_log_sum_exp(Pattern(8));
  result.mutable_returns()->set_top_tokens(Pattern(200));
  result.mutable_sums()->set_z_loss(0.5);
  result.mutable_sums()->set_divergence(0.25);
  result.set_teacher_weight_version(4);
  return result;
}

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

template <typename Message>
Received<Message> MustDecode(const std::string& bytes, size_t slice_size) {
  grpc::ByteBuffer buffer = InSlices(bytes, slice_size);
  Received<Message> received;
  EXPECT_TRUE(Decode(&buffer, &received));
  return received;
}

std::string Field(uint32_t number, const std::string& content) {
  std::string bytes;
  for (uint64_t value : {uint64_t{number} << 3 | 2, uint64_t{content.size()}}) {
    for (; value > 0x7f; value >>= 7) bytes.push_back(static_cast<char>((value & 0x7f) | 0x80));
    bytes.push_back(static_cast<char>(value));
  }
  return bytes + content;
}

std::string Join(std::initializer_list<std::string> pieces) {
  std::string bytes;
  for (const std::string& piece : pieces) bytes += piece;
  return bytes;
}

TEST(EncodeTest, BytesAreThoseOfTheGeneratedClasses) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{70000}, size_t{3000000}}) {
    const std::string small = Pattern(size);
    const std::string large = Pattern(2 * size);
    v1::ComputeRequest request;
    *request.mutable_chunk() = FullChunk();
    request.mutable_chunk()->set_labels(small);
    request.mutable_chunk()->set_hidden_states(large);
    EXPECT_EQ(ToString(Encode(FullChunk(), Bytes(small), grpc::Slice(large))), request.SerializeAsString());
    for (const size_t teacher_size : {size_t{1}, 3 * size}) {
      const std::string teacher = Pattern(teacher_size);
      request.mutable_chunk()->set_teacher_hidden_states(teacher);
      EXPECT_EQ(ToString(Encode(FullChunk(), Bytes(small), grpc::Slice(large), grpc::Slice(teacher))),
                request.SerializeAsString());
    }
    v1::ComputeResponse response;
    *response.mutable_result() = FullResult();
    response.mutable_result()->set_losses(small);
    response.mutable_result()->set_dx(large);
    EXPECT_EQ(ToString(Encode(FullResult(), Bytes(small), grpc::Slice(large))), response.SerializeAsString());
  }
}

TEST(EncodeTest, TheLargeTensorIsReferredToAndLetGo) {
  static int let_go = 0;
  let_go = 0;
  std::string large = Pattern(100000);
  {
    grpc::ByteBuffer buffer;
    {
      const grpc::Slice slice(
          large.data(), large.size(), [](void*) { ++let_go; }, nullptr);
      buffer = Encode(FullResult(), {}, slice);
    }
    EXPECT_EQ(let_go, 0);
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2U);
    EXPECT_EQ(static_cast<const void*>(slices[1].begin()), large.data());
  }
  EXPECT_EQ(let_go, 1);
}

TEST(DecodeTest, ReadsWhatTheGeneratedClassesWroteHoweverItIsSliced) {
  v1::ComputeRequest request;
  *request.mutable_chunk() = FullChunk();
  request.mutable_chunk()->set_labels(Pattern(1000));
  request.mutable_chunk()->set_hidden_states(Pattern(4321));
  request.mutable_chunk()->set_teacher_hidden_states(Pattern(777));
  v1::ComputeResponse response;
  *response.mutable_result() = FullResult();
  response.mutable_result()->set_losses(Pattern(200));
  response.mutable_result()->set_dx(Pattern(70000));
  for (const size_t slice : {size_t{1}, size_t{3}, size_t{24}, size_t{1000}, size_t{1} << 20}) {
    const auto in = MustDecode<v1::ComputeRequest>(request.SerializeAsString(), slice);
    EXPECT_TRUE(in.message.chunk().labels().empty());
    EXPECT_TRUE(in.message.chunk().hidden_states().empty());
    EXPECT_TRUE(in.message.chunk().teacher_hidden_states().empty());
    EXPECT_EQ(in.extra.bytes, 777);
    EXPECT_EQ(Whole(in).SerializeAsString(), request.SerializeAsString());
    EXPECT_TRUE(in.message.chunk().has_gradient_scale());
    EXPECT_TRUE(in.message.chunk().options().has_softcap());
    EXPECT_EQ(in.message.chunk().token_inputs().weights(), Pattern(68));
    const auto out = MustDecode<v1::ComputeResponse>(response.SerializeAsString(), slice);
    EXPECT_EQ(Whole(out).SerializeAsString(), response.SerializeAsString());
  }
}

TEST(DecodeTest, ReadsMessagesWithoutTensors) {
  v1::ComputeRequest request;
  EXPECT_EQ(MustDecode<v1::ComputeRequest>("", 1).message.message_case(),
            v1::ComputeRequest::MESSAGE_NOT_SET);
  request.mutable_start()->set_session_id("s");
  request.mutable_start()->set_incarnation("i");
  EXPECT_EQ(MustDecode<v1::ComputeRequest>(request.SerializeAsString(), 2).message.SerializeAsString(),
            request.SerializeAsString());
  request.mutable_chunk();
  EXPECT_TRUE(MustDecode<v1::ComputeRequest>(request.SerializeAsString(), 2).message.has_chunk());
  v1::ComputeResponse response;
  response.mutable_ready()->mutable_marks()->set_accepted(7);
  EXPECT_EQ(MustDecode<v1::ComputeResponse>(response.SerializeAsString(), 2).message.SerializeAsString(),
            response.SerializeAsString());
  response.mutable_applied()->set_applied(3);
  EXPECT_EQ(MustDecode<v1::ComputeResponse>(response.SerializeAsString(), 2).message.SerializeAsString(),
            response.SerializeAsString());
}

// Any order, repeated, split over several submessages, of a later version, in encodings nobody writes: what
// the generated class makes of it.
TEST(DecodeTest, UnusualMessagesReadAsByTheGeneratedClass) {
  const std::string sequence("\x08\x07", 2);
  const std::string later("\xc2\x0c\x02hi\xc0\x0c\x2a", 8);  // field 200, as bytes and as a number
  const std::string group("\xcb\x0c\x08\x01\xcc\x0c", 6);    // field 201
  const std::string labels = Field(14, Pattern(16));
  const std::string hidden = Field(15, Pattern(300));
  const std::string overlong_tag("\xfa\x80\x00\x02xy", 6);  // field 15 in three bytes
  for (const std::string& bytes : {
           Field(2, Join({hidden, labels, sequence})), Field(2, Join({labels, sequence, hidden, later})),
           Field(2, Join({Field(15, "first"), hidden, Field(15, "last"), labels, sequence, "\x08\x09"})),
           Field(2, hidden + Field(15, "")),
           Field(2, Join({Field(16, "first"), hidden, Field(16, Pattern(50))})),
           Field(2, hidden) + Field(2, Field(16, Pattern(50))),
           Field(2, hidden + labels) + Field(2, sequence + Field(14, "12345678")),
           Join({Field(2, hidden), Field(1, Field(1, "s")), Field(2, labels)}),
           Join({Field(2, hidden), Field(1, Field(1, "s"))}), Field(2, hidden) + later,
           Join({later, Field(2, labels + hidden)}), Field(2, Join({hidden, group, labels})),
           Field(2, overlong_tag + labels),
           Field(2, hidden + std::string("\x78\x05", 2)),  // field 15 as a number: unknown
           Field(2, hidden) + std::string("\x10\x05", 2),  // the chunk as a number
       }) {
    for (const size_t slice : {size_t{1}, size_t{7}, size_t{1000}}) {
      v1::ComputeRequest expected;
      ASSERT_TRUE(expected.ParseFromString(bytes));
      EXPECT_EQ(Whole(MustDecode<v1::ComputeRequest>(bytes, slice)).SerializeAsString(),
                expected.SerializeAsString());
    }
  }
}

// An answer has no third tensor: that field is a later version's.
TEST(DecodeTest, AnAnswerKeepsWhatItDoesNotKnowUnderTheNumberOfAThirdTensor) {
  const std::string bytes = Field(2, Field(16, "later") + Field(15, Pattern(30)));
  const auto received = MustDecode<v1::ComputeResponse>(bytes, 4);
  EXPECT_EQ(received.extra.bytes, 0);
  v1::ComputeResponse expected;
  ASSERT_TRUE(expected.ParseFromString(bytes));
  EXPECT_EQ(Whole(received).SerializeAsString(), expected.SerializeAsString());
}

TEST(DecodeTest, TensorsOutliveTheBuffer) {
  ReceivedRequest received;
  {
    grpc::ByteBuffer buffer =
        Encode(FullChunk(), {}, grpc::Slice(Pattern(100000)), grpc::Slice(Pattern(50000)));
    ASSERT_TRUE(Decode(&buffer, &received));
    EXPECT_FALSE(buffer.Valid());
  }
  EXPECT_EQ(ToString(received.large), Pattern(100000));
  EXPECT_EQ(ToString(received.extra), Pattern(50000));
}

TEST(DecodeTest, CountsTheBlocksThatSlicesKeepNotTheBytesSeen) {
  const std::string block = Pattern(kReadBlockBytes);
  const grpc::Slice whole(block);
  v1::ComputeRequest request;
  request.mutable_chunk()->set_hidden_states(Pattern(100));
  const std::string bytes = request.SerializeAsString();
  // One message in pieces of 30 bytes, each from a block of its own; then in pieces of the same block.
  std::vector<grpc::Slice> apart;
  std::vector<grpc::Slice> together;
  const grpc::Slice shared(bytes);
  for (size_t begin = 0; begin < bytes.size(); begin += 30) {
    const size_t end = std::min(bytes.size(), begin + 30);
    apart.push_back(grpc::Slice(bytes).sub(begin, end));
    together.push_back(shared.sub(begin, end));
  }
  grpc::ByteBuffer buffer(apart.data(), apart.size());
  ReceivedRequest received;
  ASSERT_TRUE(Decode(&buffer, &received));
  EXPECT_EQ(received.kept_bytes / kReadBlockBytes, static_cast<int64_t>(apart.size()) - 1)
      << "the last piece is short enough to lie in the slice itself";
  buffer = grpc::ByteBuffer(together.data(), together.size());
  ASSERT_TRUE(Decode(&buffer, &received));
  EXPECT_EQ(received.kept_bytes / kReadBlockBytes, 1);
}

}  // namespace
}  // namespace lossd::wire::compute_wire_test
