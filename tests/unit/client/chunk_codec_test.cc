// The hand-made bytes of chunks and results against the generated classes.
#include "client/src/batch/chunk_codec.h"

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace lossd::internal::chunk_codec_test {
namespace {

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const auto& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

// `bytes` in slices of `size`.
grpc::ByteBuffer InSlices(const std::string& bytes, size_t size) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += size) slices.emplace_back(bytes.substr(begin, size));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string Pattern(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 31 + 7);
  return text;
}

TEST(EncodeChunkTest, GeneratedClassReadsTheSameChunk) {
  for (const size_t size : {size_t{1}, size_t{127}, size_t{128}, size_t{70000}, size_t{3000000}}) {
    v1::Chunk chunk;
    chunk.set_sequence(300);
    chunk.set_generation(2);
    chunk.set_first_token(1 << 20);
    chunk.set_tokens(17);
    chunk.set_ignore_index(-100);
    chunk.set_gradient_scale(0);  // explicitly present
    const std::string labels = Pattern(size);
    const std::string hidden = Pattern(2 * size + 1);
    const std::vector<std::span<const std::byte>> parts = {Bytes(hidden)};
    v1::ComputeRequest parsed;
    const LentMemory lent;  // would wait for ever if the message kept the memory
    ASSERT_TRUE(parsed.ParseFromString(ToString(EncodeChunk(chunk, Bytes(labels), parts, lent))));
    chunk.set_labels(labels);
    chunk.set_hidden_states(hidden);
    EXPECT_EQ(parsed.chunk().SerializeAsString(), chunk.SerializeAsString());
    EXPECT_TRUE(parsed.chunk().has_gradient_scale());
  }
}

TEST(EncodeChunkTest, HiddenStatesAreReadWhereTheCallerHasThem) {
  const std::string hidden = Pattern(100000);
  const std::vector<std::span<const std::byte>> parts = {Bytes(hidden)};
  const LentMemory lent;
  const grpc::ByteBuffer message = EncodeChunk(v1::Chunk(), {}, parts, lent);
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(message.Dump(&slices).ok());
  EXPECT_EQ(static_cast<const void*>(slices.back().begin()), hidden.data());
}

TEST(EncodeChunkTest, HiddenStatesInPiecesAreOneTensorLentOrCopied) {
  for (const size_t piece : {size_t{1}, size_t{100}, size_t{4096}, size_t{50000}}) {
    const std::string hidden = Pattern(3 * piece);
    // Without the middle, as that of an ignored token.
    const std::vector<std::span<const std::byte>> parts = {Bytes(hidden).subspan(0, piece),
                                                           Bytes(hidden).subspan(2 * piece)};
    const LentMemory lent;
    const grpc::ByteBuffer message = EncodeChunk(v1::Chunk(), {}, parts, lent);
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(message.Dump(&slices).ok());
    EXPECT_EQ(slices.back().begin() == reinterpret_cast<const uint8_t*>(parts[1].data()), piece >= 4096);
    v1::ComputeRequest parsed;
    ASSERT_TRUE(parsed.ParseFromString(ToString(message)));
    EXPECT_EQ(parsed.chunk().hidden_states(), hidden.substr(0, piece) + hidden.substr(2 * piece));
  }
}

TEST(LentMemoryTest, WaitsUntilTheLastMessageIsGone) {
  const std::string hidden = Pattern(100000);
  const std::vector<std::span<const std::byte>> parts = {Bytes(hidden)};
  std::atomic<bool> dropped = false;
  std::thread holder;
  {
    const LentMemory lent;
    const grpc::ByteBuffer first = EncodeChunk(v1::Chunk(), {}, parts, lent);
    const grpc::ByteBuffer second = EncodeChunk(v1::Chunk(), {}, parts, lent);
    holder = std::thread([&dropped, message = second]() mutable {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      dropped = true;
      message.Clear();
    });
  }
  EXPECT_TRUE(dropped);
  holder.join();
}

TEST(EncodeStartTest, GeneratedClassReadsTheSameStart) {
  v1::ComputeStart start;
  start.set_session_id("s");
  start.set_incarnation("i");
  v1::ComputeRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(ToString(EncodeStart(start))));
  EXPECT_EQ(parsed.start().SerializeAsString(), start.SerializeAsString());
}

std::vector<std::span<std::byte>> One(std::string& bytes) {
  return {std::as_writable_bytes(std::span(bytes))};
}

v1::ComputeResponse SomeResult() {
  v1::ComputeResponse response;
  v1::ChunkResult* result = response.mutable_result();
  result->set_sequence(5);
  result->set_disposition(v1::DISPOSITION_REPEATED);
  result->set_loss_sum(1.25);
  result->set_weight_version(9);
  result->mutable_error()->set_message("said");
  result->set_losses(Pattern(1000));
  result->set_dx(Pattern(4321));
  return response;
}

TEST(DecodedResponseTest, ReadsWhatTheGeneratedClassWroteHoweverItIsSliced) {
  const v1::ComputeResponse response = SomeResult();
  for (const size_t slice : {size_t{1}, size_t{3}, size_t{1000}, size_t{1} << 20}) {
    grpc::ByteBuffer buffer = InSlices(response.SerializeAsString(), slice);
    const auto decoded = DecodedResponse::Decode(&buffer);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    std::string losses(static_cast<size_t>(decoded->losses_bytes()), '\0');
    std::string dx(static_cast<size_t>(decoded->dx_bytes()), '\0');
    decoded->CopyLosses(One(losses));
    // In two pieces, of which an empty one is none.
    const auto room = std::as_writable_bytes(std::span(dx));
    decoded->CopyDx(std::vector{room.subspan(0, 1234), room.subspan(0, 0), room.subspan(1234)});
    v1::ComputeResponse whole = decoded->header();
    EXPECT_TRUE(whole.result().losses().empty());
    whole.mutable_result()->set_losses(losses);
    whole.mutable_result()->set_dx(dx);
    EXPECT_EQ(whole.SerializeAsString(), response.SerializeAsString());
  }
}

TEST(DecodedResponseTest, ReadsTheOtherMessages) {
  v1::ComputeResponse response;
  response.mutable_ready()->mutable_marks()->set_accepted(7);
  grpc::ByteBuffer buffer = InSlices(response.SerializeAsString(), 2);
  auto decoded = DecodedResponse::Decode(&buffer);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->header().ready().marks().accepted(), 7U);
  response.mutable_applied()->set_applied(3);
  buffer = InSlices(response.SerializeAsString(), 2);
  decoded = DecodedResponse::Decode(&buffer);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->header().applied().applied(), 3U);
}

TEST(DecodedResponseTest, FieldsOfALaterVersionDoNotDisturb) {
  // Field 200 of the response and of the result, length-delimited and varint.
  v1::ComputeResponse response = SomeResult();
  std::string result = response.result().SerializeAsString();
  result += std::string("\xc2\x0c\x02hi\xc0\x0c\x2a", 8);
  std::string bytes("\x12", 1);
  bytes.push_back(static_cast<char>((result.size() & 0x7f) | 0x80));
  bytes.push_back(static_cast<char>(result.size() >> 7));
  bytes += result + std::string("\xc2\x0c\x02hi", 5);
  grpc::ByteBuffer buffer = InSlices(bytes, 100);
  const auto decoded = DecodedResponse::Decode(&buffer);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->header().result().sequence(), 5U);
  EXPECT_EQ(decoded->dx_bytes(), 4321);
}

TEST(DecodedResponseTest, GarbageIsAnErrorAndNeverReadsOutside) {
  const google::protobuf::LogSilencer silent;  // it reports every string that is no UTF-8
  const std::string good = SomeResult().SerializeAsString();
  for (size_t size = 1; size < 60; ++size) {  // truncated in every small field and in the lengths
    grpc::ByteBuffer buffer = InSlices(good.substr(0, size), 7);
    EXPECT_FALSE(DecodedResponse::Decode(&buffer).ok()) << size;
  }
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good.substr(0, 64);
    for (int change = 0; change < 3; ++change) bytes[random() % bytes.size()] = static_cast<char>(random());
    grpc::ByteBuffer buffer = InSlices(bytes, 1 + random() % 16);
    const auto decoded = DecodedResponse::Decode(&buffer);
    if (!decoded.ok()) continue;
    ASSERT_LE(decoded->losses_bytes() + decoded->dx_bytes(), 64);
    std::string losses(static_cast<size_t>(decoded->losses_bytes()), '\0');
    decoded->CopyLosses(One(losses));
  }
}

}  // namespace
}  // namespace lossd::internal::chunk_codec_test
