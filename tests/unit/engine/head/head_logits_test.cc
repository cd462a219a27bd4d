// Calls for logits on their way through a head: what they are of, what they wait for, and what they leave
// alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/common/errors.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::head_logits_test {
namespace {

using kernels::DataType;
using lossd::testing::Await;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Answer = absl::StatusOr<LogitsAnswer>;

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> Values(const void* bytes, size_t size) {
  std::vector<T> values(size / sizeof(T));
  std::memcpy(values.data(), bytes, size);
  return values;
}

std::vector<float> Floats(const std::string& bytes) { return Values<float>(bytes.data(), bytes.size()); }
std::vector<float> Floats(const ResultBytes& bytes) {
  return Values<float>(bytes.data(), static_cast<size_t>(bytes.size()));
}

// Rows of two hidden states each, whose sums the fake logits begin with.
LogitsRequest Request(const std::vector<float>& hidden = {1, 2}) {
  LogitsRequest request;
  request.rows = static_cast<int64_t>(hidden.size()) / EngineFixture::kHidden;
  request.hidden_states = Bytes(hidden);
  return request;
}

std::future<Answer> Start(Head& head, LogitsRequest request) {
  auto answer = std::make_shared<std::promise<Answer>>();
  head.Logits(std::move(request), [answer](Answer logits) { answer->set_value(std::move(logits)); });
  return answer->get_future();
}

Answer Logits(Head& head, LogitsRequest request) { return Await("logits", Start(head, std::move(request))); }

class HeadLogitsTest : public EngineFixture, public ::testing::Test {
 protected:
  explicit HeadLogitsTest(EngineOptions options = {}, HeadConfig config = {}, FakeOptions device = {})
      : EngineFixture(std::move(options), std::move(device), std::move(config)) {}

  const std::shared_ptr<RecordingListener> listener_ = std::make_shared<RecordingListener>();
};

TEST_F(HeadLogitsTest, AreOfTheRowsAskedForAndTellTheVersion) {
  WriteWeights();
  const Answer answer = Logits(*head, Request({1, 2, -5, 0.5f}));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->weight_version, 2U);
  EXPECT_THAT(Floats(answer->logits), ElementsAre(3, 4, 5, 6, -4.5, -3.5, -2.5, -1.5));
  EXPECT_EQ(answer->top_tokens + answer->top_logits + answer->log_sum_exp, "");
  EXPECT_EQ(engine->counters().logits_calls, 1U);
  EXPECT_EQ(engine->counters().logits_rows, 2U);
}

TEST_F(HeadLogitsTest, TheLargestOnesAreAllThatIsToldIfTheyAreWanted) {
  LogitsRequest request = Request({1, 2, 3, 4});
  request.top_k = 2;
  request.softcap = 7.0f;
  const Answer answer = Logits(*head, request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->logits.size(), 0);
  EXPECT_THAT(Values<int32_t>(answer->top_tokens.data(), answer->top_tokens.size()), ElementsAre(3, 2, 3, 2));
  EXPECT_THAT(Floats(answer->top_logits), ElementsAre(6, 5, 10, 9));
  EXPECT_THAT(Floats(answer->log_sum_exp), ElementsAre(7, 7));
}

TEST_F(HeadLogitsTest, HiddenStatesAndLogitsMayBeOfEveryType) {
  for (const DataType hidden_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const DataType logits_type : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      LogitsRequest request = Request();
      const std::vector<float> hidden = {1, 2};
      request.hidden_type = hidden_type;
      request.logits_type = logits_type;
      request.hidden_states.resize(static_cast<size_t>(2 * kernels::SizeOf(hidden_type)));
      kernels::Convert(DataType::kFloat32, hidden.data(), hidden_type, request.hidden_states.data(), 2);
      const Answer answer = Logits(*head, request);
      ASSERT_TRUE(answer.ok()) << answer.status();
      ASSERT_EQ(answer->logits.size(), kVocab * kernels::SizeOf(logits_type));
      std::vector<float> logits(kVocab);
      kernels::Convert(logits_type, answer->logits.data(), DataType::kFloat32, logits.data(), kVocab);
      EXPECT_THAT(logits, ElementsAre(3, 4, 5, 6)) << Name(hidden_type) << " " << Name(logits_type);
    }
  }
}

class HeadLogitsOfOptionsTest : public HeadLogitsTest {
 protected:
  HeadLogitsOfOptionsTest() : HeadLogitsTest({}, Config()) {}
  static HeadConfig Config() {
    HeadConfig config;
    config.logit_scale = 2;
    config.softcap = 30;
    config.weight_gradients = WeightGradients::kFrozen;
    config.bias = true;
    return config;
  }
};

TEST_F(HeadLogitsOfOptionsTest, TheHeadsOwnCountUnlessTheCallSaysOtherwise) {
  LogitsRequest request = Request();
  request.top_k = 1;
  Answer answer = Logits(*head, request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_THAT(Floats(answer->top_logits), ElementsAre(112));
  EXPECT_THAT(Floats(answer->log_sum_exp), ElementsAre(30));
  request.logit_scale = 1.0f;
  request.softcap = 0.0f;
  request.bias = Bias::kIgnore;
  answer = Logits(*head, request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_THAT(Floats(answer->top_logits), ElementsAre(6));
  EXPECT_THAT(Floats(answer->log_sum_exp), ElementsAre(0));
}

TEST_F(HeadLogitsTest, OfAnotherVersionThanDemandedAreRefused) {
  LogitsRequest request = Request();
  request.weight_version = 1;
  EXPECT_TRUE(Logits(*head, request).ok());
  WriteWeights();
  const Answer answer = Logits(*head, request);
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(answer.status()), RejectReason::kWeightVersion);
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("is 1; the weights are of version 2"));
}

TEST_F(HeadLogitsTest, WithoutWeightsThereAreNone) {
  const std::shared_ptr<Head> bare = *engine->CreateHead({"bare", kVocab, kHidden, DataType::kFloat32});
  const Answer answer = Logits(*bare, Request());
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(answer.status()), RejectReason::kNoWeights);
}

TEST_F(HeadLogitsTest, LeaveTheWindowAlone) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  Submit(lane, MakeChunk(1, 3));
  engine->WaitIdle();
  ASSERT_TRUE(Logits(*head, Request()).ok());
  EXPECT_EQ(head->Info().window_tokens, 1U);
  EXPECT_EQ(GradientSum(), 3);
  // A window that is sealed keeps nobody from them.
  const absl::StatusOr<FlushInfo> flush = BeginFlush(1, Marks());
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_TRUE(Logits(*head, Request()).ok());
  EXPECT_TRUE(head->CheckFlush(flush->flush_id).ok());
}

TEST_F(HeadLogitsTest, HoweverManyWaitChunksGoBetweenThem) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  std::vector<std::future<Answer>> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(Start(*head, Request()));
  Submit(lane, MakeChunk(2, 2));
  Submit(lane, MakeChunk(3, 3));
  gate.LetThrough();
  for (std::future<Answer>& call : calls) EXPECT_TRUE(Await("logits", std::move(call)).ok());
  // The first one came before the second chunk, the others went behind it.
  EXPECT_THAT(gate.logits_after(), ElementsAre(1, 3, 3, 3));
}

TEST_F(HeadLogitsTest, OfAHeadThatIsDeletedMeanwhileAreNotFound) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  std::vector<std::future<Answer>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(Start(*head, Request()));
  ASSERT_TRUE(engine->DeleteHead("h", Engine::DiscardGradient::kYes).ok());
  gate.LetThrough();
  for (std::future<Answer>& call : calls) {
    EXPECT_EQ(Await("logits", std::move(call)).status().code(), absl::StatusCode::kNotFound);
  }
  EXPECT_EQ(Logits(*head, Request()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(gate.logits_after(), ElementsAre());
}

TEST_F(HeadLogitsTest, ThatNobodyWaitsForAreNotComputed) {
  LogitsRequest request = Request();
  request.cancelled = [] { return true; };
  EXPECT_EQ(Logits(*head, request).status().code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(gate.logits_after(), ElementsAre());
}

TEST_F(HeadLogitsTest, AreNotTakenByAServerThatGoesAway) {
  engine->BeginDrain();
  EXPECT_EQ(Logits(*head, Request()).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(HeadLogitsTest, ADeviceThatFailsEndsTheHead) {
  gate.Fail();
  EXPECT_FALSE(Logits(*head, Request()).ok());
  EXPECT_EQ(engine->OpenSession("h", {"c", 0, 1}).status().code(), absl::StatusCode::kInternal);
}

// Two rows of hidden states, or of logits, are the limit.
class SmallLogitsTest : public HeadLogitsTest {
 protected:
  static constexpr int64_t kLimit = 2 * kVocab * 4;

  SmallLogitsTest() : HeadLogitsTest(Options()) {}
  static EngineOptions Options() {
    EngineOptions options;
    options.chunk_limits.max_chunk_bytes = kLimit;
    return options;
  }
};

TEST_F(SmallLogitsTest, MoreRowsThanACallMayHaveAreRefusedAndTheMostNamed) {
  EXPECT_EQ(head->Info().max_logits_bytes, kLimit);
  EXPECT_TRUE(Logits(*head, Request({1, 2, 3, 4})).ok());
  LogitsRequest request = Request({1, 2, 3, 4, 5, 6});
  Answer answer = Logits(*head, request);
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(answer.status()), RejectReason::kChunkTooLarge);
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("rows is 3; the most of one call is 2"));
  // Narrower ones are half as much, and the hidden states less.
  request.logits_type = DataType::kBFloat16;
  EXPECT_TRUE(Logits(*head, request).ok());
  request.logits_type = DataType::kFloat32;
  request.rows = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Logits(*head, request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SmallLogitsTest, OneRowIsAlwaysTaken) {
  const std::shared_ptr<Head> wide = *engine->CreateHead({"wide", 1000, kHidden, DataType::kFloat32});
  WriteWeights(*wide);
  const Answer answer = Logits(*wide, Request());
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->logits.size(), 4000);
}

TEST_F(SmallLogitsTest, CallsThatHoldTooMuchKeepOthersOutUntilTheirAnswersAreGone) {
  std::vector<Answer> kept;
  const auto ask = [&] { return Logits(*head, Request({1, 2, 3, 4})); };
  Answer answer = ask();
  while (answer.ok() && kept.size() < 100) {
    kept.push_back(std::move(answer));
    answer = ask();
  }
  ASSERT_EQ(answer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(answer.status()), RejectReason::kOverload);
  EXPECT_GE(kept.size(), 4U);
  kept.pop_back();
  EXPECT_TRUE(ask().ok());
  EXPECT_TRUE(ask().ok());
}

TEST_F(SmallLogitsTest, RowsCountInWhicheverTypeIsWider) {
  LogitsRequest request = Request({1, 2});
  request.hidden_type = DataType::kBFloat16;
  request.hidden_states.resize(2 * 2, '\0');
  request.top_k = 1;
  EXPECT_EQ(LogitsBytes(request, head->config()), 2 * 4 + 3 * 4) << "as operands they are fp32";
}

class FewRowsLogitsTest : public HeadLogitsTest {
 protected:
  FewRowsLogitsTest() : HeadLogitsTest(Options()) {}
  static EngineOptions Options() {
    EngineOptions options;
    options.chunk_limits.max_chunk_tokens = 3;
    return options;
  }
};

TEST_F(FewRowsLogitsTest, MoreThanAChunkMayHaveAreRefusedAndTheMostNamed) {
  EXPECT_EQ(head->Info().max_logits_rows, 3);
  EXPECT_TRUE(Logits(*head, Request({1, 2, 3, 4, 5, 6})).ok());
  const Answer answer = Logits(*head, Request({1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(answer.status()), RejectReason::kChunkTooLarge);
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("rows is 4; the most of one call is 3"));
}

TEST_F(HeadLogitsTest, MoreCallsThanMayWaitAreRefused) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  std::vector<std::future<Answer>> calls;
  for (int i = 0; i < 64; ++i) calls.push_back(Start(*head, Request()));
  std::future<Answer> refused = Start(*head, Request());
  const bool at_once = refused.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  gate.LetThrough();
  EXPECT_TRUE(at_once);
  const Answer answer = Await("the refusal", std::move(refused));
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(answer.status()), RejectReason::kOverload);
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("64 calls for logits of head h wait"));
  for (std::future<Answer>& call : calls) EXPECT_TRUE(Await("logits", std::move(call)).ok());
  EXPECT_TRUE(Logits(*head, Request()).ok());
}

// Memory that the device registered is for what it computes now, not for who waits or reads slowly.
TEST_F(HeadLogitsTest, HoldRegisteredMemoryOnlyWhileTheyAreComputed) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  std::future<Answer> call = Start(*head, Request(std::vector<float>(20'000 * kHidden, 1.0f)));
  EXPECT_EQ(gate.registered_bytes(), 0);
  gate.LetThrough();
  const Answer kept = Await("logits", std::move(call));
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(Floats(kept->logits).back(), 5);
  engine->WaitIdle();
  EXPECT_EQ(gate.registered_bytes(), 0);
}

// A device that works on 20'000 rows at once.
class ManyRowsLogitsTest : public HeadLogitsTest {
 protected:
  static constexpr int64_t kAtOnce = 20'000;
  ManyRowsLogitsTest() : HeadLogitsTest({}, {}, {.rows_of_logits = kAtOnce}) {}
};

TEST_F(ManyRowsLogitsTest, GoThroughRegisteredMemoryWherePiecesAreLarge) {
  std::vector<float> hidden(kAtOnce * kHidden, 1.0f);
  hidden.back() = 3.0f;
  const Answer answer = Logits(*head, Request(hidden));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->logits.place(), MemoryPlace::kHost);
  EXPECT_EQ(Floats(answer->logits).front(), 2);
  EXPECT_EQ(Floats(answer->logits).back(), 7);
  EXPECT_EQ(gate.most_registered_bytes(), kAtOnce * (kHidden + kVocab) * 4);
  engine->WaitIdle();
  EXPECT_EQ(gate.registered_bytes(), 0);
}

// A device that works on two rows at a time.
class PiecewiseLogitsTest : public HeadLogitsTest {
 protected:
  PiecewiseLogitsTest() : HeadLogitsTest({}, {}, {.rows_of_logits = 2}) {}
};

TEST_F(PiecewiseLogitsTest, ComeTogether) {
  LogitsRequest request = Request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  Answer answer = Logits(*head, request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_THAT(Floats(answer->logits),
              ElementsAre(3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22));
  EXPECT_EQ(gate.logits_after().size(), 3U);
  EXPECT_EQ(engine->counters().logits_calls, 1U);
  EXPECT_EQ(engine->counters().logits_rows, 5U);
  request.top_k = 1;
  answer = Logits(*head, request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_THAT(Floats(answer->top_logits), ElementsAre(6, 10, 14, 18, 22));
}

TEST_F(PiecewiseLogitsTest, ChunksGoBetweenThePieces) {
  const LaneAttachment lane = Attach(Open("c"), listener_);
  gate.Hold();
  Submit(lane, MakeChunk(1, 1));
  gate.AwaitArrival();
  std::future<Answer> call = Start(*head, Request({1, 2, 3, 4, 5, 6}));
  Submit(lane, MakeChunk(2, 2));
  gate.LetThrough();
  EXPECT_TRUE(Await("logits", std::move(call)).ok());
  EXPECT_THAT(gate.logits_after(), ElementsAre(1, 2));
}

TEST_F(PiecewiseLogitsTest, TheRestIsNotComputedForWhoWentAway) {
  auto asked = std::make_shared<std::atomic<int>>(0);
  LogitsRequest request = Request(std::vector<float>(20, 1.0f));
  request.cancelled = [asked] { return ++*asked > 2; };
  EXPECT_EQ(Logits(*head, request).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(gate.logits_after().size(), 2U);
}

TEST_F(PiecewiseLogitsTest, StartAgainIfTheWeightsAreReplacedMeanwhile) {
  const absl::StatusOr<std::string> write = head->BeginWrite("w", Head::Replace::kNo, "token");
  ASSERT_TRUE(write.ok()) << write.status();
  const std::string rows(static_cast<size_t>(head->config().weight_bytes()), '\0');
  ASSERT_TRUE((*head->FindWrite(*write))->Write(0, kVocab, DataType::kFloat32, rows, {}).ok());
  gate.OnLogits([&] { head->CommitWrite(*write, [](const auto& /*version*/) {}); });
  LogitsRequest request = Request({1, 2, 3, 4, 5, 6});
  const Answer answer = Logits(*head, request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->weight_version, 2U);
  EXPECT_THAT(Floats(answer->logits), ElementsAre(3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14));
  EXPECT_EQ(gate.logits_after().size(), 3U) << "one piece of the old weights, two of the new";
}

struct BadRequest {
  std::string name;
  std::function<void(LogitsRequest&)> spoil;
  RejectReason reason;
  std::string message;
};

TEST_F(HeadLogitsTest, RequestsThatCannotBeAreRefused) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<BadRequest> bad = {
      {"none", [](auto& r) { r.rows = 0; }, RejectReason::kNoTokens, "rows is 0"},
      {"negative", [](auto& r) { r.rows = -1; }, RejectReason::kNoTokens, "rows is -1"},
      {"short", [](auto& r) { r.hidden_states.pop_back(); }, RejectReason::kLength, "holds 7 bytes"},
      {"long", [](auto& r) { r.hidden_states += "x"; }, RejectReason::kLength, "float32 are 8"},
      {"type", [](auto& r) { r.hidden_type = DataType::kFloat16; }, RejectReason::kLength, "are 4"},
      {"nan",
       [=](auto& r) {
         r.hidden_states = Bytes<float>({1, nan});
       },
       RejectReason::kNonFinite, "1 non-finite values of 2"},
      {"scale", [](auto& r) { r.logit_scale = 0.0f; }, RejectReason::kOption, "logit_scale is 0"},
      {"softcap", [=](auto& r) { r.softcap = nan; }, RejectReason::kOption, "softcap is nan"},
      {"bias", [](auto& r) { r.bias = Bias::kUse; }, RejectReason::kOption, "without a bias"},
      {"top_k", [](auto& r) { r.top_k = 5; }, RejectReason::kOption, "top_k is 5; it must be in [0, 4]"},
      {"top_k_below", [](auto& r) { r.top_k = -1; }, RejectReason::kOption, "top_k is -1"},
      {"narrow_top_k",
       [](auto& r) {
         r.top_k = 1;
         r.logits_type = DataType::kBFloat16;
       },
       RejectReason::kDtype, "with top_k logits are float32"},
  };
  for (const BadRequest& test_case : bad) {
    SCOPED_TRACE(test_case.name);
    LogitsRequest request = Request();
    test_case.spoil(request);
    const Answer answer = Logits(*head, request);
    EXPECT_EQ(answer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(answer.status()), test_case.reason);
    EXPECT_THAT(std::string(answer.status().message()), HasSubstr(test_case.message));
  }
  EXPECT_THAT(gate.logits_after(), ElementsAre());
}

}  // namespace
}  // namespace lossd::engine::head_logits_test
