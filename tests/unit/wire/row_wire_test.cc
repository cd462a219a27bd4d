// Our bytes of row streams against the generated classes', both ways, and mutated ones.
#include "proto/wire/row_wire.h"

#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <random>
#include <string>

#include "tests/unit/wire/wire_bytes.h"

namespace lossd::wire::row_wire_test {
namespace {

std::string Pattern(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 31 + 7);
  return text;
}

v1::ReadGradientResponse Header(const v1::ReadGradientResponse& /*kind*/) {
  v1::ReadGradientResponse header;
  header.set_first_row(int64_t{1} << 40);
  header.set_rows(3);
  header.set_dtype(v1::DATA_TYPE_BFLOAT16);
  header.set_bias_gradient(Pattern(12));
  return header;
}
v1::ReadWeightsResponse Header(const v1::ReadWeightsResponse& /*kind*/) {
  v1::ReadWeightsResponse header;
  header.set_weight_version(0xffffffffffffffff);
  header.set_first_row(7);
  header.set_rows(3);
  header.set_dtype(v1::DATA_TYPE_FLOAT32);
  header.set_bias(Pattern(12));
  return header;
}
void SetRows(const std::string& rows, v1::ReadGradientResponse* message) { message->set_gradient(rows); }
void SetRows(const std::string& rows, v1::ReadWeightsResponse* message) { message->set_weights(rows); }

template <typename Message>
std::string Whole(const ReceivedRows<Message>& received) {
  Message whole = received.message;
  if (received.rows.bytes > 0) SetRows(ToString(received.rows), &whole);
  return whole.SerializeAsString();
}

template <typename Message>
class RowWireTest : public ::testing::Test {};
using Messages = ::testing::Types<v1::ReadGradientResponse, v1::ReadWeightsResponse>;
TYPED_TEST_SUITE(RowWireTest, Messages);

TYPED_TEST(RowWireTest, WritesTheGeneratedClassesBytes) {
  for (const size_t size : {0, 1, 127, 128, 70000}) {
    TypeParam whole = Header(TypeParam());
    SetRows(Pattern(size), &whole);
    const std::string rows = Pattern(size);
    const grpc::ByteBuffer bytes = Encode(Header(TypeParam()), grpc::Slice(rows.data(), rows.size()));
    EXPECT_EQ(ToString(bytes), whole.SerializeAsString()) << size;
  }
}

TYPED_TEST(RowWireTest, RefersToTheRowsInsteadOfCopyingThem) {
  const std::string rows = Pattern(5000);
  const grpc::Slice slice(rows.data(), rows.size());
  std::vector<grpc::Slice> parts;
  ASSERT_TRUE(Encode(Header(TypeParam()), slice).Dump(&parts).ok());
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[1].begin(), slice.begin());
}

TYPED_TEST(RowWireTest, ReadsTheGeneratedClassesBytesWhereverTheyAreCut) {
  TypeParam whole = Header(TypeParam());
  SetRows(Pattern(300), &whole);
  for (const size_t size : {1, 2, 3, 17, 1000}) {
    grpc::ByteBuffer bytes = InSlices(whole.SerializeAsString(), size);
    ReceivedRows<TypeParam> received;
    ASSERT_TRUE(Decode(&bytes, &received)) << size;
    EXPECT_EQ(received.rows.bytes, 300);
    EXPECT_EQ(Whole(received), whole.SerializeAsString()) << size;
  }
}

TEST(GradientChecksum, IsOfTheBiasAndTheRowsWhereverTheyAreCut) {
  v1::ReadGradientResponse message = Header(v1::ReadGradientResponse());
  SetRows(Pattern(300), &message);
  const std::string summed = message.bias_gradient() + message.gradient();
  const uint64_t expected = XXH3_64bits(summed.data(), summed.size());
  for (const size_t size : {1, 17, 1000}) {
    grpc::ByteBuffer bytes = InSlices(message.SerializeAsString(), size);
    ReceivedRows<v1::ReadGradientResponse> received;
    ASSERT_TRUE(Decode(&bytes, &received)) << size;
    EXPECT_EQ(ChecksumOf(received.message.bias_gradient(), received.rows.parts), expected) << size;
  }
}

TYPED_TEST(RowWireTest, AcceptsMutatedBytesExactlyIfTheGeneratedParserDoes) {
  const google::protobuf::LogSilencer silent;
  std::mt19937 random(1);
  TypeParam message = Header(TypeParam());
  SetRows(Pattern(40), &message);
  const std::string valid = message.SerializeAsString();
  int accepted = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    std::string bytes = valid;
    // The header and what follows the rows' tag alike.
    for (uint32_t change = random() % 3; change > 0; --change) {
      const size_t at = random() % std::min<size_t>(bytes.size(), 40);
      if (random() % 3 == 0) {
        bytes.erase(at, 1 + random() % 3);
      } else {
        bytes[at] = static_cast<char>(random());
      }
    }
    if (random() % 4 == 0) bytes += valid.substr(0, random() % valid.size());
    TypeParam expected;
    const bool parses = expected.ParseFromString(bytes);
    grpc::ByteBuffer buffer = InSlices(bytes, 1 + random() % 64);
    ReceivedRows<TypeParam> received;
    ASSERT_EQ(Decode(&buffer, &received), parses) << ::testing::PrintToString(bytes);
    if (!parses) continue;
    ++accepted;
    ASSERT_EQ(Whole(received), expected.SerializeAsString()) << ::testing::PrintToString(bytes);
  }
  EXPECT_GT(accepted, kRounds / 10);
  EXPECT_LT(accepted, kRounds - kRounds / 10);
}

}  // namespace
}  // namespace lossd::wire::row_wire_test
