// The client library against the real server, where a fake could share the client's misunderstandings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/src/common/safetensors_type.h"
#include "lossd/client.h"
#include "tests/integration/client_server/client_server_fixture.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/test_server.h"

namespace lossd::client_server_test {
namespace {

using testing::ClientServerTest;
using testing::Data;
using ::testing::HasSubstr;
using testing::kHidden;
using testing::kVocab;
using testing::RandomFloats;
using testing::TestServerOptions;

TEST_F(ClientServerTest, WeightsComeBackAsTheHeadKeepsThem) {
  TestServerOptions options;
  Start(options, DataType::kBFloat16);
  const std::vector<float> written = RandomFloats(kVocab * kHidden, 3);
  const auto version = head_->WriteWeights(DataType::kFloat32, written.data());
  ASSERT_TRUE(version.ok()) << version.status();
  std::vector<uint16_t> narrow(written.size());
  std::vector<float> wide(written.size());
  ASSERT_TRUE(head_->ReadWeights(DataType::kBFloat16, narrow.data()).ok());
  const auto read = head_->ReadWeights(DataType::kFloat32, wide.data());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, *version);
  for (size_t i = 0; i < written.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &wide[i], sizeof bits);
    ASSERT_EQ(bits, static_cast<uint32_t>(narrow[i]) << 16);
    ASSERT_LE(std::fabs(wide[i] - written[i]), std::fabs(written[i]) / 256);
  }
}

// Large chunks stay in the slices they came in, small ones are gathered on arrival: a row's bits are the
// same.
TEST_F(ClientServerTest, LargeChunksGiveTheSameBitsAsSmallOnes) {
  StartWithWeights();
  constexpr int64_t kTokens = 12000;
  constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));
  Data large(kTokens);
  Data small(kTokens);
  auto of_large = head_->OpenSession({.chunk_bytes = 4001 * kRowBytes});
  auto of_small = head_->OpenSession({.chunk_bytes = 400 * kRowBytes});
  ASSERT_TRUE(of_large.ok() && of_small.ok());
  for (int round = 0; round < 2; ++round) {
    const auto result = of_large->Compute(large.batch(), large.outputs());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->chunks, 3);
  }
  const auto result = of_small->Compute(small.batch(), small.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(large.losses, small.losses);
  EXPECT_EQ(large.dx, small.dx);
}

// On the CPU fp16 is widened, which is exact: a head that keeps the same values in fp32 has the same bits.
TEST_F(ClientServerTest, AnFp16HeadAnswersAsAnFp32HeadOfTheSameValues) {
  Start({}, DataType::kFloat16);
  ASSERT_TRUE(head_->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data()).ok());
  std::vector<float> weights(kVocab * kHidden);
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, weights.data()).ok());
  auto wide = client_->CreateHead(
      {.name = "wide", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(wide.ok()) << wide.status();
  ASSERT_TRUE(wide->WriteWeights(DataType::kFloat32, weights.data()).ok());
  // dW depends on how rows are divided into chunks, so both have them whole.
  auto wide_session = wide->OpenSession({});
  ASSERT_TRUE(wide_session.ok()) << wide_session.status();
  Data narrow_data(30);
  for (float& x : narrow_data.hidden) x = std::round(x * 64) / 64;  // fp16 holds it
  Data wide_data = narrow_data;
  Session session = Open(30);
  ASSERT_TRUE(session.Compute(narrow_data.batch(), narrow_data.outputs()).ok());
  ASSERT_TRUE(wide_session->Compute(wide_data.batch(), wide_data.outputs()).ok());
  EXPECT_GT(narrow_data.losses[0], 0.0F);
  EXPECT_TRUE(narrow_data.losses == wide_data.losses);
  EXPECT_TRUE(narrow_data.dx == wide_data.dx);
  const std::vector<float> gradient = Flush();
  head_ = std::make_unique<Head>(*std::move(wide));
  EXPECT_TRUE(Flush() == gradient);
}

TEST_F(ClientServerTest, LossesAndDxDoNotDependOnTheCut) {
  StartWithWeights();
  Data coarse(50);
  Data fine(50);
  Session whole = Open(50);
  Session pieces = Open(3);
  ASSERT_TRUE(whole.Compute(coarse.batch(), coarse.outputs()).ok());
  const auto result = pieces.Compute(fine.batch(), fine.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->chunks, 17);
  EXPECT_TRUE(coarse.losses == fine.losses);
  EXPECT_TRUE(coarse.dx == fine.dx);
  EXPECT_GT(coarse.losses[0], 0.0F);
}

TEST_F(ClientServerTest, SessionMayBeOpenedBeforeThereAreWeights) {
  Start();
  Session session = Open();
  Data data(10);
  const absl::Status early = session.Compute(data.batch(), data.outputs()).status();
  EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition) << early;
  EXPECT_THAT(std::string(early.message()), HasSubstr("no weights"));
  ASSERT_TRUE(head_->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data()).ok());
  EXPECT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
}

TEST_F(ClientServerTest, TinyCreditAndChunkLimitOnlyMakeMoreChunks) {
  TestServerOptions options;
  options.engine.chunk_limits.max_chunk_tokens = 4;
  options.engine.lane_credit_bytes = 2000;
  StartWithWeights(options);
  Session session = Open();
  Data data(101);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GE(result->chunks, 26);
  EXPECT_EQ(result->valid_tokens, 101);
}

TEST_F(ClientServerTest, OtherSessionsFollowAFlush) {
  StartWithWeights();
  Session first = Open();
  Session second = Open();
  Data data(30);
  ASSERT_TRUE(first.Compute(data.batch(), data.outputs()).ok());
  const std::vector<float> alone = Flush();
  // `second` is told by its own handle; a client of its own has to find out by being refused.
  auto other = Client::Connect(server_->target(), {});
  ASSERT_TRUE(other.ok());
  auto other_head = (*other)->GetHead("head");
  ASSERT_TRUE(other_head.ok());
  auto third = other_head->OpenSession({.chunk_bytes = 8 * kHidden * 4});
  ASSERT_TRUE(third.ok());
  EXPECT_TRUE(Flush() == std::vector<float>(kVocab * kHidden, 0.0F));  // an empty window
  ASSERT_TRUE(second.Compute(data.batch(), data.outputs()).ok());
  EXPECT_TRUE(Flush() == alone);
  ASSERT_TRUE(third->Compute(data.batch(), data.outputs()).ok());
  EXPECT_TRUE(Flush() == alone);
}

TEST_F(ClientServerTest, AFlushThatAnOperatorAbortsIsNoLongerCommittedAndTheNextHasAllOfIt) {
  StartWithWeights();
  Session session = Open();
  Data data(30);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  std::vector<float> gradient(kVocab * kHidden);
  const SessionMarks marks = session.marks();
  const auto frozen = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
  ASSERT_TRUE(frozen.ok()) << frozen.status();

  const auto other = Client::Connect(server_->target(), {});
  ASSERT_TRUE(other.ok()) << other.status();
  const auto operators = (*other)->GetHead("head");
  ASSERT_TRUE(operators.ok()) << operators.status();
  const auto seen = operators->Info();
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(seen->flush_id, frozen->flush_id);
  EXPECT_TRUE(operators->AbortFlush(seen->flush_id).ok());
  EXPECT_TRUE(operators->Info()->flush_id.empty());

  // What was read is in the window still, and must not count twice.
  EXPECT_TRUE(absl::IsAborted(head_->CommitFlush(frozen->flush_id)));
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  const SessionMarks both = session.marks();
  const auto flushed = head_->Flush({}, {&both, 1}, gradient.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  EXPECT_EQ(flushed->generation, 1U);
  EXPECT_EQ(flushed->window_tokens, 60U);
}

TEST_F(ClientServerTest, FlushToFileHoldsTheSameGradientInEachType) {
  StartWithWeights();
  Session session = Open();
  Data data(30);
  const lossd::testing::ScratchFolder folder;
  const std::filesystem::path path = folder.path() / "gradient.safetensors";
  for (const DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
    std::vector<float> gradient(kVocab * kHidden);
    const SessionMarks marks = session.marks();
    const auto peeked = head_->Flush({.commit = false}, {&marks, 1}, gradient.data());
    ASSERT_TRUE(peeked.ok()) << peeked.status();
    // The same flush, since it has the same arguments.
    const auto result = head_->FlushToFile({.dtype = type}, {&marks, 1}, path);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->flush_id, peeked->flush_id);
    EXPECT_EQ(result->window_tokens, 30U);
    EXPECT_GT(result->norm, 0);
    const auto file = SafetensorsFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    const auto tensor = file->Find("lm_head.weight.grad");
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    ASSERT_EQ(tensor->dtype, internal::ToSafetensors(type));
    ASSERT_EQ(tensor->data.size(), gradient.size() * static_cast<size_t>(SizeOf(type)));
    if (type == DataType::kFloat32) {
      EXPECT_EQ(std::memcmp(tensor->data.data(), gradient.data(), tensor->data.size()), 0);
    }
  }
}

TEST_F(ClientServerTest, SeveralThreadsEachWithASessionAddUp) {
  StartWithWeights();
  constexpr uint64_t kThreads = 3;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (uint64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([this] {
      Session session = Open();
      for (int step = 0; step < 5; ++step) {
        Data data(20, static_cast<uint32_t>(step));
        EXPECT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto info = head_->Info();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->sessions.size(), kThreads);
  std::vector<float> gradient(kVocab * kHidden);
  const auto flushed = head_->Flush({}, info->sessions, gradient.data());
  ASSERT_TRUE(flushed.ok()) << flushed.status();
  EXPECT_EQ(flushed->window_tokens, kThreads * 5 * 20);
}

TEST_F(ClientServerTest, HeadsAreListedDeletedAndReported) {
  StartWithWeights();
  const auto heads = client_->ListHeads();
  ASSERT_TRUE(heads.ok()) << heads.status();
  ASSERT_EQ(heads->size(), 1U);
  EXPECT_EQ(heads->front().config.hidden_size, kHidden);
  EXPECT_EQ(heads->front().weight_version, 1U);
  const auto status = client_->Status();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->device, "cpu");
  EXPECT_FALSE(status->incarnation.empty());
  const auto memory = client_->Memory();
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_GE(memory->reserved_bytes, kVocab * kHidden * 8);
  EXPECT_TRUE(client_->DeleteHead("head").ok());
  EXPECT_EQ(client_->GetHead("head").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace lossd::client_server_test
