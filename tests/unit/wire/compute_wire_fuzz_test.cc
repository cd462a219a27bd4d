// Random and mutated messages: accepted exactly if the generated parser accepts them, with equal results.
// Under AddressSanitizer also: nothing outside the slices is read.
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

#include "tests/unit/wire/wire_bytes.h"

namespace lossd::wire::compute_wire_fuzz_test {
namespace {

class Fuzz {
 public:
  explicit Fuzz(uint32_t seed) : random_(seed) {}

  uint32_t Below(uint32_t limit) { return static_cast<uint32_t>(random_() % limit); }

  // Mostly well formed.
  std::string Message() {
    std::string bytes;
    const uint32_t fields = 1 + (Below(3) == 0 ? Below(3) : 0);
    for (uint32_t i = 0; i < fields; ++i) {
      bytes += Below(5) == 0 ? Field(Below(4), Blob()) : Field(2, Body());
    }
    return bytes;
  }

  std::string Mutated(std::string bytes) {
    for (uint32_t change = Below(4); change > 0 && !bytes.empty(); --change) {
      const size_t at = Below(static_cast<uint32_t>(bytes.size()));
      switch (Below(5)) {
        case 0:
          bytes[at] = static_cast<char>(random_());
          break;
        case 1:
          bytes[at] = static_cast<char>(static_cast<uint8_t>(bytes[at]) ^ (1U << Below(8)));
          break;
        case 2:
          bytes.erase(at, 1 + Below(4));
          break;
        case 3:
          bytes.insert(at, 1, static_cast<char>(random_()));
          break;
        default:
          bytes.resize(at);
      }
    }
    return bytes;
  }

 private:
  std::string Varint(uint64_t value) {
    std::string bytes;
    for (; value > 0x7f; value >>= 7) bytes.push_back(static_cast<char>((value & 0x7f) | 0x80));
    bytes.push_back(static_cast<char>(value));
    if (Below(30) == 0) {  // longer than needed
      bytes.back() = static_cast<char>(bytes.back() | 0x80);
      bytes.append(Below(8), '\x80');
      bytes.push_back(static_cast<char>(Below(3)));
    }
    return bytes;
  }
  std::string Blob() {
    std::string bytes(Below(40), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }
  std::string Field(uint32_t number, const std::string& content) {
    const size_t wrong = Below(50) == 0 ? Below(200) : 0;
    return Varint(number << 3 | 2) + Varint(content.size() + wrong) + content;
  }
  std::string Body() {
    std::string bytes;
    for (uint32_t fields = Below(8); fields > 0; --fields) {
      const uint32_t number = Below(20) == 0 ? static_cast<uint32_t>(random_()) >> Below(29) : Below(18);
      switch (Below(10)) {
        case 0:
        case 1:
        case 2:
          bytes += Varint(number << 3) + Varint(random_() >> Below(64));
          break;
        case 3:
          bytes += Varint(number << 3 | 1) + std::string(8, 'd');
          break;
        case 4:
          bytes += Varint(number << 3 | 5) + std::string(4, 'f');
          break;
        case 5:
          bytes += Varint(number << 3 | 3) + Varint(8) + Varint(1) + Varint(number << 3 | 4);
          break;
        case 7:  // options, per-token inputs, returns and sums: messages that hold messages and bytes
          bytes += Field(11 + Below(3),
                         Field(1 + Below(8), Below(2) == 0 ? Blob() : "") + Varint(8) + Varint(Below(9)));
          break;
        case 6:
          bytes += Varint(number << 3 | Below(8)) + Blob();
          break;
        default:
          bytes += Field(14 + Below(3), Blob());
      }
    }
    return bytes;
  }

  std::mt19937_64 random_;
};

template <typename Message>
void Compare(const std::string& bytes, size_t slice_size, int* accepted) {
  Message expected;
  const bool valid = expected.ParseFromString(bytes);
  grpc::ByteBuffer buffer = InSlices(bytes, slice_size);
  Received<Message> received;
  ASSERT_EQ(Decode(&buffer, &received), valid) << ::testing::PrintToString(bytes);
  if (!valid) return;
  ++*accepted;
  ASSERT_EQ(Whole(received).SerializeAsString(), expected.SerializeAsString())
      << ::testing::PrintToString(bytes);
}

TEST(ComputeWireFuzzTest, AcceptsWhatTheGeneratedParserAcceptsWithTheSameResult) {
  constexpr int kRounds = 100000;
  const google::protobuf::LogSilencer silent;  // it reports every string that is no UTF-8
  int accepted = 0;
  for (uint32_t round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(round);
    Fuzz fuzz(round);
    std::string bytes = fuzz.Message();
    if (round % 2 == 1) bytes = fuzz.Mutated(std::move(bytes));
    const size_t slice_size = 1 + fuzz.Below(fuzz.Below(2) == 0 ? 4 : 64);
    Compare<v1::ComputeRequest>(bytes, slice_size, &accepted);
    Compare<v1::ComputeResponse>(bytes, slice_size, &accepted);
    if (HasFatalFailure()) return;
  }
  // Otherwise the rounds would show little.
  EXPECT_GT(accepted, kRounds / 5);
  EXPECT_LT(accepted, 2 * kRounds - kRounds / 5);
}

}  // namespace
}  // namespace lossd::wire::compute_wire_fuzz_test
