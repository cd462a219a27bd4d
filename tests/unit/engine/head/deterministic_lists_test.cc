// Lists of tokens in deterministic sessions on the CPU: the same bits of dW however the tokens are sent, and
// memory for the lists.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/linear_cross_entropy.h"
#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/errors.h"
#include "tests/unit/engine/end_flush.h"
#include "tests/unit/engine/head/deterministic_fixture.h"

namespace lossd::engine::deterministic_lists_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class DeterministicListsTest : public DeterministicTest {
 protected:
  std::vector<float> Settled() {
    engine_->WaitIdle();
    return Flush();
  }
  // [first, end) in chunks of up to so many tokens; the next sequence.
  uint64_t SendListed(const LaneAttachment& lane, int64_t first, int64_t end, int64_t most,
                      uint64_t sequence = 1) {
    const uint64_t generation = head_->Info().generation;
    for (int64_t place = first; place < end;) {
      const int64_t next = std::min({place + most, EndOfLists(place), end});
      Submit(lane, Listed(sequence++, place, next - place, generation));
      place = next;
    }
    return sequence;
  }
  // In a session of its own, which is closed.
  std::vector<float> GradientOf(const std::function<void(const LaneAttachment&)>& send) {
    const std::string session = Open("c", 0);
    send(Attach(session));
    engine_->WaitIdle();
    EXPECT_EQ(engine_->counters().chunks_rejected, 0U);
    std::vector<float> gradient = Flush();
    EXPECT_TRUE(engine_->CloseSession(session).ok());
    return gradient;
  }
  std::vector<float> Undisturbed() {
    return GradientOf([this](const LaneAttachment& lane) { SendListed(lane, 0, kTokens, kMostTokens); });
  }
};

TEST_F(DeterministicListsTest, TheGradientHasTheSameBitsHoweverTheTokensAreSent) {
  const std::vector<float> expected = Undisturbed();
  int cuts_of_streams = 0;
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t limit) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
    };
    const auto lanes = static_cast<int32_t>(below(3) + 1);
    const std::string session = Open("c" + std::to_string(seed), static_cast<int32_t>(seed), lanes);
    std::vector<std::pair<int64_t, int64_t>> cuts;
    const int64_t most = below(kMostTokens) + 1;
    for (int64_t place = 0; place < kTokens;) {
      const int64_t end = std::min(place + below(most) + 1, EndOfLists(place));
      cuts.emplace_back(place, end);
      place = end;
    }
    if (below(2) == 0) std::shuffle(cuts.begin(), cuts.end(), random);
    const uint64_t generation = head_->Info().generation;
    std::vector<LaneAttachment> attached;
    for (int32_t lane = 0; lane < lanes; ++lane) attached.push_back(Attach(session, lane));
    std::vector<std::vector<std::pair<int64_t, int64_t>>> sent(attached.size());
    const auto send = [&](size_t lane, uint64_t sequence) {
      const auto& [place, end] = sent[lane][sequence - 1];
      Submit(attached[lane], Listed(sequence, place, end - place, generation));
    };
    for (const auto& cut : cuts) {
      const auto lane = static_cast<size_t>(below(lanes));
      sent[lane].push_back(cut);
      send(lane, sent[lane].size());
      if (below(8) > 0) continue;
      // The stream is cut. What was taken last comes again, and what was withdrawn.
      ++cuts_of_streams;
      head_->DetachLane(attached[lane]);
      attached[lane] = Attach(session, static_cast<int32_t>(lane));
      const uint64_t accepted = attached[lane].marks.accepted;
      for (uint64_t sequence = std::max<uint64_t>(accepted, 1); sequence <= sent[lane].size(); ++sequence) {
        send(lane, sequence);
      }
    }
    engine_->WaitIdle();
    ASSERT_EQ(engine_->counters().chunks_rejected, 0U);
    ASSERT_TRUE(SameBits(Flush(), expected));
    ASSERT_TRUE(engine_->CloseSession(session).ok());
  }
  EXPECT_GT(cuts_of_streams, 25);
}

// In fp64, from the definition.
TEST_F(DeterministicListsTest, TheGradientIsThatOfTheReference) {
  std::vector<float> weight(kVocab * kHidden);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>((i * 31) % 97) / 97;
  std::vector<double> expected(weight.size());
  for (int64_t place = 0; place < kTokens; place = EndOfLists(place)) {
    const Chunk chunk = Listed(1, place, EndOfLists(place) - place);
    const std::string hidden = [&chunk] {
      std::string bytes(static_cast<size_t>(chunk.hidden_states.size()), '\0');
      Gather(chunk.hidden_states.parts(), reinterpret_cast<std::byte*>(bytes.data()));
      return bytes;
    }();
    kernels::LinearCrossEntropyParams params;
    params.tokens = chunk.tokens;
    params.vocab = kVocab;
    params.hidden = kHidden;
    params.weight = weight.data();
    params.hidden_states = hidden.data();
    params.labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
    params.options = chunk.options.loss;
    params.gradient_scale = chunk.gradient_scale;
    if (!chunk.token_weights.empty()) {
      params.token_weights = reinterpret_cast<const float*>(chunk.token_weights.data());
    }
    params.kept_tokens = KeptTokensOf(chunk);
    params.target_lists = TargetListsOf(chunk);
    params.distillation = ListKindOf(chunk).targets;
    std::vector<double> losses(static_cast<size_t>(chunk.tokens));
    ASSERT_EQ(kernels::ReferenceLinearCrossEntropy(params, {.losses = losses.data(), .dw = expected.data()}),
              kernels::Status::kOk);
  }
  const std::vector<float> gradient = Undisturbed();
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < gradient.size(); ++i) {
    difference += std::pow(static_cast<double>(gradient[i]) - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  EXPECT_GT(size, 0);
  EXPECT_LT(std::sqrt(difference / size), 1e-6);
}

TEST_F(DeterministicListsTest, WithoutDxTheBitsAreTheSame) {
  const std::vector<float> expected = Undisturbed();
  EXPECT_TRUE(SameBits(GradientOf([this](const LaneAttachment& lane) {
                         uint64_t sequence = 0;
                         for (int64_t place = 0; place < kTokens;) {
                           const int64_t end = std::min(place + 5, EndOfLists(place));
                           Chunk chunk = Listed(++sequence, place, end - place, head_->Info().generation);
                           chunk.mode = ComputeMode::kLossAndWeightGradient;
                           Submit(lane, std::move(chunk));
                           place = end;
                         }
                       }),
                       expected));
}

TEST_F(DeterministicListsTest, IgnoredTokensAreAsIfTheyWereNotThere) {
  const std::vector<float> expected = Undisturbed();
  EXPECT_TRUE(SameBits(GradientOf([this](const LaneAttachment& lane) {
                         uint64_t sequence = 0;
                         for (int64_t place = 0; place < kTokens; ++place) {
                           if (place % 7 == 3) continue;
                           Submit(lane, Listed(++sequence, place, 1, head_->Info().generation));
                         }
                       }),
                       expected));
}

// A tile that weights close is added as pieces, each with the weights that its rows were answered with.
TEST_F(DeterministicListsTest, RowsAreAddedWithTheWeightsTheyWereAnsweredWith) {
  const auto send = [this](const LaneAttachment& lane, const std::vector<int64_t>& ends) {
    const uint64_t sequence = SendListed(lane, 44, 50, 6);
    engine_->WaitIdle();
    Write(5);
    uint64_t next = sequence;
    int64_t place = 50;
    for (const int64_t end : ends) {
      Submit(lane, Listed(next++, place, end - place));
      place = end;
    }
    return Settled();
  };
  // A session that adds what comes as it comes: the tile has 16 tokens from 48 on.
  const auto opened = engine_->OpenSession("h", {"plain", 9, 1});
  ASSERT_TRUE(opened.ok());
  const LaneAttachment plain = Attach(opened->info.session_id);
  Submit(plain, Listed(1, 44, 4));
  Submit(plain, Listed(2, 48, 2));
  engine_->WaitIdle();
  Write(5);
  Submit(plain, Listed(3, 50, 14));
  Submit(plain, Listed(4, 64, 1));
  const std::vector<float> expected = Settled();
  Create({});
  EXPECT_TRUE(SameBits(send(Attach(Open("c", 0)), {57, 65}), expected));
}

TEST_F(DeterministicListsTest, AFlushThatIsAbortedLeavesWhatWasAdded) {
  const LaneAttachment lane = Attach(Open("c", 0));
  const uint64_t next = SendListed(lane, 0, 90, 7);
  engine_->WaitIdle();
  const absl::StatusOr<FlushInfo> aborted = BeginFlush();
  ASSERT_TRUE(aborted.ok()) << aborted.status();
  const std::vector<float> half = Read(*aborted);
  ASSERT_TRUE(AbortFlush(*head_, aborted->flush_id).ok());
  SendListed(lane, 90, kTokens, 7, next);
  const std::vector<float> whole = Settled();
  EXPECT_FALSE(SameBits(whole, half));

  Create({});
  const LaneAttachment other = Attach(Open("c", 0));
  const uint64_t after = SendListed(other, 0, 90, kMostTokens);
  engine_->WaitIdle();
  const absl::StatusOr<FlushInfo> again = BeginFlush();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(SameBits(Read(*again), half));
  ASSERT_TRUE(AbortFlush(*head_, again->flush_id).ok());
  SendListed(other, 90, kTokens, 3, after);
  EXPECT_TRUE(SameBits(Settled(), whole)) << "the tile that was closed at 90 is two pieces here, too";
}

TEST_F(DeterministicListsTest, MemoryForListsIsReservedAsTheyComeAndRefusedWithATable) {
  const std::string session = Open("c", 0);
  const LaneAttachment lane = Attach(session);
  const auto reserved = [this] { return engine_->budget().reserved(); };
  const int64_t none = reserved();
  EXPECT_TRUE(AnswerOf(lane, Listed(1, 0, 1)).error.ok());
  EXPECT_EQ(reserved(), none) << "it has no lists";
  EXPECT_EQ(FieldOf(AnswerOf(lane, Listed(2, 0, 1)).error), "window_token");
  EXPECT_TRUE(AnswerOf(lane, Listed(3, 20, 4)).error.ok());
  EXPECT_EQ(reserved(), none + kMiB);
  EXPECT_TRUE(AnswerOf(lane, Listed(4, 50, 4)).error.ok());
  EXPECT_EQ(reserved(), none + kMiB) << "there is room for more";
  EXPECT_EQ(TotalBytes(head_->Info().memory) + (1 << 20), reserved());
  Settled();
  ASSERT_TRUE(engine_->CloseSession(session).ok());
  engine_->WaitIdle();
  Open("c", 0);
  EXPECT_EQ(reserved(), none) << "nothing of it is left";

  Create({}, none + kMiB - 1);
  const LaneAttachment cramped = Attach(Open("c", 0));
  uint64_t sequence = 0;
  for (const int64_t place : {20, 50}) {
    SCOPED_TRACE(place);
    const ChunkAnswer refused = AnswerOf(cramped, Listed(++sequence, place, 4));
    EXPECT_EQ(refused.error.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(FieldOf(refused.error), FieldOf(Listed(1, place, 1).lists));
    EXPECT_THAT(refused.error.message(), HasSubstr("lists of tokens in a deterministic session of head h"));
    EXPECT_THAT(refused.error.message(), HasSubstr("tiles"));
    EXPECT_TRUE(AnswerOf(cramped, MakeChunk(++sequence, place, 4)).error.ok()) << "its place is free";
  }
  EXPECT_EQ(AnswerOf(cramped, Listed(1, 20, 4)).disposition, Disposition::kRejected) << "it stays rejected";
  Chunk losses = Listed(5, 30, 4);
  losses.mode = ComputeMode::kLossOnly;
  losses.window_token.reset();
  EXPECT_TRUE(AnswerOf(cramped, std::move(losses)).error.ok()) << "losses alone are not kept";
  Settled();
}

TEST_F(DeterministicListsTest, FixedSegmentsLeaveKeptTokensAsTheyAreAndTakeNoSoftTargets) {
  const std::vector<float> expected =
      GradientOf([this](const LaneAttachment& lane) { SendListed(lane, 0, 43, 5); });
  HeadConfig fixed;
  fixed.fixed_segments = true;
  Create(fixed);
  const LaneAttachment lane = Attach(Open("c", 0));
  const uint64_t next = SendListed(lane, 0, 43, 16);
  engine_->WaitIdle();
  const ChunkAnswer refused = AnswerOf(lane, Listed(next, 43, 4));
  EXPECT_EQ(refused.error.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(FieldOf(refused.error), "token_inputs.target_lists");
  EXPECT_TRUE(SameBits(Settled(), expected)) << "deterministic sessions have fixed segments in any case";
}

}  // namespace
}  // namespace lossd::engine::deterministic_lists_test
