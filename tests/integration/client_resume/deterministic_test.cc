// Deterministic sessions through real gRPC: dW has the same bits whatever the size of chunks and of batches,
// the order of these, the number of lanes, and the network do, with soft targets and without, over all tokens
// and over lists of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/support/test_server.h"

namespace lossd::deterministic_test {
namespace {

using testing::CutAfter;
using testing::FaultProxy;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::RandomLabels;
using testing::TestServer;
using testing::TestServerOptions;

constexpr int64_t kVocab = 61;
constexpr int64_t kHidden = 20;
constexpr int64_t kTokens = 700;
constexpr int64_t kRowBytes = kHidden * static_cast<int64_t>(sizeof(float));

// Tokens [first, end) are sent with these options, whatever batch they come in.
struct Stretch {
  int64_t end;
  float label_smoothing;
  float lse_square_scale;
  float gradient_scale;
  float softcap;
  const char* teacher;  // null: none
  float temperature;
  enum Lists { kNone, kKept, kTargets } lists = kNone;
};
constexpr Stretch kStretches[] = {{100, 0, 0, 1, 0, nullptr, 1},
                                  {150, 0, 0, 1, 0, nullptr, 1, Stretch::kKept},
                                  {200, 0.1F, 0, 1, 0, nullptr, 1},
                                  {270, 0.1F, 0, 1, 0, "narrow", 1},
                                  {300, 0.1F, 0, 1, 0, "wide", 1},
                                  {370, 0, 1e-3F, 0.25F, 0, "wide", 2},
                                  {420, 0, 1e-3F, 0.25F, 5, nullptr, 1, Stretch::kTargets},
                                  {500, 0.2F, 1e-4F, 0.25F, 5, nullptr, 1},
                                  {550, 0, 0, 2, 5, "narrow", 3},
                                  {620, 0, 0, 2, 5, nullptr, 1, Stretch::kTargets},
                                  {670, 0, 1e-3F, 2, 5, nullptr, 1, Stretch::kKept},
                                  {kTokens, 0, 0, 2, 5, nullptr, 1}};
constexpr int64_t kNarrow = 6;  // hidden sizes of the teachers
constexpr int64_t kWide = 28;

const Stretch& StretchOf(int64_t token) {
  return *std::find_if(std::begin(kStretches), std::end(kStretches),
                       [token](const Stretch& stretch) { return token < stretch.end; });
}

class DeterministicClientTest : public ::testing::Test {
 protected:
  // Tiles of 64 tokens.
  static TestServerOptions Options() {
    TestServerOptions options;
    options.engine.chunk_limits = {.max_chunk_bytes = 100 * kRowBytes, .max_chunk_tokens = 100};
    return options;
  }
  DeterministicClientTest()
      : server_(Options()),
        labels_(RandomLabels(kTokens, kVocab, 3)),
        hidden_(RandomFloats(kTokens * kHidden, 4)),
        weights_(RandomFloats(kTokens, 5)),
        teacher_hidden_(RandomFloats(kTokens * kWide, 6)) {
    for (int64_t i = 0; i < kTokens; i += 5) labels_[static_cast<size_t>(i)] = -100;
    for (size_t i = 0; i < labels_.size(); ++i) {
      // Each with its label, if it has one, and of a length of its own.
      const size_t size = i % 11 == 3 ? 50 : 1 + i % 4;
      const auto first = static_cast<int32_t>(std::max<int64_t>(labels_[i], 0));
      for (size_t k = 0; k < size; ++k) listed_.push_back((first + static_cast<int32_t>(k * 7)) % kVocab);
      probabilities_.insert(probabilities_.end(), size, 0.75F / static_cast<float>(size));
      offsets_.push_back(std::ssize(listed_));
    }
    const Head head = HeadAt(server_.target());
    const auto written = head.WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data());
    EXPECT_TRUE(written.ok()) << written.status();
    for (const auto& [name, width] : {std::pair("narrow", kNarrow), std::pair("wide", kWide)}) {
      const auto teacher = clients_.back()->CreateHead({.name = name,
                                                        .vocab_size = kVocab,
                                                        .hidden_size = width,
                                                        .weight_type = DataType::kFloat32,
                                                        .frozen = true});
      EXPECT_TRUE(teacher.ok()) << teacher.status();
      EXPECT_TRUE(teacher->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * width, 2).data()).ok());
    }
  }

  Head HeadAt(const std::string& target) {
    auto client = Client::Connect(target, {});
    EXPECT_TRUE(client.ok()) << client.status();
    clients_.push_back(*std::move(client));
    auto head = clients_.back()->CreateHead(
        {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
    EXPECT_TRUE(head.ok()) << head.status();
    return *std::move(head);
  }
  static SessionOptions Deterministically(int32_t lanes = 1, int64_t chunk_tokens = 50) {
    return {.chunk_bytes = chunk_tokens * kRowBytes, .lanes = lanes, .deterministic = Deterministic::kYes};
  }

  template <typename Value>
  std::span<const Value> PartOf(const std::vector<Value>& listed, int64_t first, int64_t end) const {
    const auto begin = static_cast<size_t>(offsets_[static_cast<size_t>(first)]);
    return std::span(listed).subspan(begin, static_cast<size_t>(offsets_[static_cast<size_t>(end)]) - begin);
  }
  // Until the next call.
  TokenLists ListsOf(int64_t first, int64_t end) {
    batch_offsets_.assign(offsets_.begin() + first, offsets_.begin() + end + 1);
    for (int64_t& offset : batch_offsets_) offset -= offsets_[static_cast<size_t>(first)];
    return {.offsets = batch_offsets_, .tokens = PartOf(listed_, first, end)};
  }

  Batch BatchOf(int64_t first, int64_t end) {
    const Stretch& stretch = StretchOf(first);
    Batch batch{
        .labels = std::span(labels_).subspan(static_cast<size_t>(first), static_cast<size_t>(end - first)),
        .hidden_states = hidden_.data() + first * kHidden,
        .gradient_scale = stretch.gradient_scale};
    batch.loss.label_smoothing = stretch.label_smoothing;
    batch.loss.lse_square_scale = stretch.lse_square_scale;
    batch.loss.softcap = stretch.softcap;
    batch.token_weights = std::span(weights_).subspan(static_cast<size_t>(first), batch.labels.size());
    if (stretch.lists == Stretch::kKept) batch.kept_tokens = ListsOf(first, end);
    if (stretch.lists == Stretch::kTargets) {
      batch.target_lists = {.lists = ListsOf(first, end), .label_weight = 0.25F};
      batch.target_lists.probabilities = PartOf(probabilities_, first, end);
    }
    if (stretch.teacher != nullptr) {
      const int64_t width = stretch.teacher == std::string_view("narrow") ? kNarrow : kWide;
      batch.distillation = {.teacher = stretch.teacher,
                            .hidden_size = width,
                            .hidden_states = teacher_hidden_.data() + first * width,
                            .temperature = stretch.temperature,
                            .label_weight = 0.5F};
    }
    return batch;
  }
  void Compute(Session& session, int64_t first, int64_t end, std::optional<int64_t> place = std::nullopt) {
    std::vector<float> losses(static_cast<size_t>(end - first));
    std::vector<float> dx(static_cast<size_t>((end - first) * kHidden));
    Batch batch = BatchOf(first, end);
    batch.window_token = place;
    const auto result = session.Compute(batch, {.losses = losses, .dx = dx.data()});
    ASSERT_TRUE(result.ok()) << result.status();
  }
  std::vector<float> Flush(const Head& head) {
    std::vector<float> gradient(kVocab * kHidden);
    const auto info = head.Info();
    EXPECT_TRUE(info.ok()) << info.status();
    const auto result = head.Flush({}, info->sessions, gradient.data());
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->window_tokens, static_cast<uint64_t>(kTokens / 5 * 4));
    return gradient;
  }
  // The gradient of the tokens as they are, in batches that are as large as can be.
  std::vector<float> Expected() {
    const Head head = HeadAt(server_.target());
    auto session = head.OpenSession(Deterministically());
    EXPECT_TRUE(session.ok()) << session.status();
    int64_t first = 0;
    for (const Stretch& stretch : kStretches) {
      Compute(*session, std::exchange(first, stretch.end), stretch.end);
    }
    std::vector<float> gradient = Flush(head);
    EXPECT_TRUE(session->Close().ok());
    return gradient;
  }

  TestServer server_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<int64_t> labels_;
  std::vector<float> hidden_;
  std::vector<float> weights_;
  std::vector<float> teacher_hidden_;  // of the wide one; the narrow one takes the beginning
  std::vector<int64_t> offsets_ = {0};
  std::vector<int32_t> listed_;
  std::vector<float> probabilities_;
  std::vector<int64_t> batch_offsets_;
};

TEST_F(DeterministicClientTest, TheBitsAreTheSameInSixtyRandomSchedules) {
  const std::vector<float> expected = Expected();
  std::mt19937 random(20261122);
  const auto below = [&random](int64_t limit) { return static_cast<int64_t>(random()) % limit; };
  int cuts = 0;
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const bool is_cut = round % 3 == 0;
    FaultProxy proxy(server_.target(), [&, budgets = std::mt19937(random())](int connection) mutable {
      if (!is_cut || connection % 3 == 2) return CutAfter(-1);
      return CutAfter(static_cast<int64_t>(budgets() % (2 * kTokens * kRowBytes)));
    });
    const Head head = HeadAt(proxy.target());
    // Out of order they wait in tiles, with what each chunk takes beside its tensors: few of them, then.
    const bool shuffled = round % 4 == 1;
    const int64_t chunk_tokens = shuffled ? 60 : below(60) + 1;
    auto session = head.OpenSession(Deterministically(static_cast<int32_t>(below(4) + 1), chunk_tokens));
    ASSERT_TRUE(session.ok()) << session.status();
    // Batches, by default in order, which the library numbers by itself.
    std::vector<std::pair<int64_t, int64_t>> batches;
    for (int64_t first = 0; first < kTokens;) {
      const int64_t end = std::min(StretchOf(first).end, first + below(round % 2 == 0 ? 300 : 25) + 1);
      batches.emplace_back(first, end);
      first = end;
    }
    if (shuffled) {  // near enough to where they belong
      for (size_t i = 0; i + 3 < batches.size(); i += 3) {
        std::shuffle(batches.begin() + static_cast<int64_t>(i), batches.begin() + static_cast<int64_t>(i) + 3,
                     random);
      }
    }
    for (const auto& [first, end] : batches) {
      Compute(*session, first, end, shuffled ? std::optional(first) : std::nullopt);
    }
    ASSERT_TRUE(Flush(HeadAt(server_.target())) == expected);
    ASSERT_TRUE(session->Close().ok());
    cuts += proxy.faults();
  }
  EXPECT_GE(cuts, 10);
}

TEST_F(DeterministicClientTest, EachWindowIsNumberedAnewAndLossesAloneTakeNoPlace) {
  const std::vector<float> expected = Expected();
  const Head head = HeadAt(server_.target());
  auto session = head.OpenSession(Deterministically(2, 17));
  ASSERT_TRUE(session.ok()) << session.status();
  for (int window = 0; window < 3; ++window) {
    int64_t first = 0;
    for (const Stretch& stretch : kStretches) {
      Batch losses = BatchOf(0, 9);
      losses.mode = ComputeMode::kLossOnly;
      ASSERT_TRUE(session->Compute(losses, {}).ok());
      Compute(*session, std::exchange(first, stretch.end), stretch.end);
    }
    ASSERT_TRUE(Flush(head) == expected) << "window " << window;
  }
}

TEST_F(DeterministicClientTest, AProcessThatWasRestartedSaysWhereItGoesOn) {
  const std::vector<float> expected = Expected();
  const Head head = HeadAt(server_.target());
  SessionOptions options = Deterministically();
  options.client_key = "trainer";
  std::vector<uint64_t> sequences;
  {
    auto session = head.OpenSession(options);
    ASSERT_TRUE(session.ok()) << session.status();
    Compute(*session, 0, 100);
    Compute(*session, 100, 150);
    const auto result = session->Compute(BatchOf(150, 200), {});
    ASSERT_TRUE(result.ok()) << result.status();
    sequences = result->first_sequences;
  }
  auto session = head.OpenSession(options);
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE(session->ResumeAt(sequences).ok());
  Compute(*session, 150, 200, 150);  // once more, for its losses
  int64_t first = 200;
  for (const Stretch& stretch : kStretches) {
    if (stretch.end > first) Compute(*session, std::exchange(first, stretch.end), stretch.end);
  }
  EXPECT_TRUE(Flush(head) == expected);
}

TEST_F(DeterministicClientTest, APlaceThatIsTakenIsRejectedAndRanksMustDiffer) {
  const Head head = HeadAt(server_.target());
  auto session = head.OpenSession(Deterministically());
  ASSERT_TRUE(session.ok()) << session.status();
  Compute(*session, 0, 50);
  Batch batch = BatchOf(50, 100);
  batch.window_token = 49;
  const absl::Status taken = session->Compute(batch, {}).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(taken.message(), HasSubstr("window_token is 49"));
  Compute(*session, 50, 100, 50);
  batch.window_token = -3;
  EXPECT_EQ(session->Compute(batch, {}).status().code(), absl::StatusCode::kInvalidArgument);
  Compute(*session, 100, 150);

  const absl::Status other = head.OpenSession(Deterministically()).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(other.message(), HasSubstr("rank is 0"));
}

TEST(DeterministicClient, ListsThatFindNoMemoryAreRefusedAndLeaveTheirPlacesFree) {
  TestServerOptions options;
  options.engine.chunk_limits = {.max_chunk_bytes = 100 * kRowBytes, .max_chunk_tokens = 100};
  options.engine.memory_limit_bytes = (8 << 20) + (1 << 20);  // room for the session, and for no lists
  TestServer server(options);
  auto client = Client::Connect(server.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  auto head = (*client)->CreateHead(
      {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data()).ok());
  auto session = head->OpenSession({.deterministic = Deterministic::kYes});
  ASSERT_TRUE(session.ok()) << session.status();
  const std::vector<int64_t> labels = {3, 5};
  const std::vector<float> hidden = RandomFloats(2 * kHidden, 2);
  const std::vector<int64_t> offsets = {0, 2, 3};
  const std::vector<int32_t> listed = {3, 4, 5};
  Batch batch{.labels = labels, .hidden_states = hidden.data()};
  batch.kept_tokens = {.offsets = offsets, .tokens = listed};
  const absl::Status refused = session->Compute(batch, {}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("lists of tokens in a deterministic session of head head"));
  batch.kept_tokens = {};
  batch.window_token = 0;
  EXPECT_TRUE(session->Compute(batch, {}).ok());
}

TEST(DeterministicClient, ASessionThatFindsNoMemoryIsRefusedAtOnce) {
  TestServerOptions options;
  options.engine.memory_limit_bytes = (8 << 20) + 3 * kVocab * kHidden * 4 + 1000;
  TestServer server(options);
  auto client = Client::Connect(server.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  auto head = (*client)->CreateHead(
      {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  const absl::Status status = head->OpenSession({.deterministic = Deterministic::kYes}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("tiles"));
  EXPECT_TRUE(head->OpenSession({}).ok());
}

}  // namespace
}  // namespace lossd::deterministic_test
