// The client library's regions against the real server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/regions/region_fixture.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/unit/rpc/held_port.h"

namespace lossd::regions_client_test {
namespace {

using testing::CutAfter;
using testing::FaultProxy;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::RandomLabels;
using testing::TestServer;
using testing::WithRegions;

constexpr int64_t kVocab = 61;

struct Shape {
  int64_t tokens = 100;
  int64_t hidden = 20;
  DataType hidden_type = DataType::kFloat32;
  DataType dx_type = DataType::kFloat32;
};

// A batch's data in plain memory.
struct Data {
  explicit Data(const Shape& of)
      : shape(of),
        labels(RandomLabels(of.tokens, kVocab, 5)),
        hidden(static_cast<size_t>(HiddenBytes())),
        losses(static_cast<size_t>(of.tokens)),
        dx(static_cast<size_t>(DxBytes())) {
    labels[3] = -100;
    const std::vector<float> values = RandomFloats(of.tokens * of.hidden, 6);
    for (size_t i = 0; i < values.size(); ++i) {
      // The upper half of an fp32 number is a bf16 number.
      const auto element = static_cast<size_t>(SizeOf(of.hidden_type));
      const auto* bytes = reinterpret_cast<const std::byte*>(&values[i]);
      std::memcpy(&hidden[i * element], bytes + sizeof(float) - element, element);
    }
  }
  // For bits of dW: ignored tokens are left out of payloads, whose chunks then end elsewhere.
  void LabelAll() { labels[3] = 3; }
  int64_t HiddenBytes() const { return shape.tokens * shape.hidden * SizeOf(shape.hidden_type); }
  int64_t DxBytes() const { return shape.tokens * shape.hidden * SizeOf(shape.dx_type); }
  Batch BatchAt(const void* hidden_states) const {
    return {.labels = labels, .hidden_type = shape.hidden_type, .hidden_states = hidden_states};
  }
  BatchOutputs OutputsAt(void* to) { return {.losses = losses, .dx_type = shape.dx_type, .dx = to}; }

  const Shape shape;
  std::vector<int64_t> labels;
  std::vector<std::byte> hidden;
  std::vector<float> losses;
  std::vector<std::byte> dx;
};

struct Connected {
  Connected(const std::string& target, int64_t hidden, const ClientOptions& options = {}) {
    auto connected = Client::Connect(target, options);
    EXPECT_TRUE(connected.ok()) << connected.status();
    client = *std::move(connected);
    auto created = client->CreateHead(
        {.name = "head", .vocab_size = kVocab, .hidden_size = hidden, .weight_type = DataType::kFloat32});
    EXPECT_TRUE(created.ok()) << created.status();
    head = std::make_unique<Head>(*std::move(created));
  }
  void WriteWeights() const {
    const auto written =
        head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * head->config().hidden_size, 1).data());
    EXPECT_TRUE(written.ok()) << written.status();
  }
  Session Open(int64_t chunk_bytes, Timing timing = Timing::kNone) const {
    auto session = head->OpenSession({.chunk_bytes = chunk_bytes, .timing = timing});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }
  Region CreateRegion(int64_t bytes) const {
    auto region = client->CreateRegion(RegionKind::kSystem, bytes);
    EXPECT_TRUE(region.ok()) << region.status();
    return *std::move(region);
  }
  std::vector<float> Flush() const {
    std::vector<float> gradient(static_cast<size_t>(kVocab * head->config().hidden_size));
    const auto info = head->Info();
    EXPECT_TRUE(info.ok());
    EXPECT_TRUE(head->Flush({}, info->sessions, gradient.data()).ok());
    return gradient;
  }
  std::unique_ptr<Client> client;
  std::unique_ptr<Head> head;
};

std::byte* At(const Region& region, int64_t offset) {
  return static_cast<std::byte*>(region.data()) + offset;
}

// Tokens of a chunk are a multiple of every shape's step, so that chunks are cut alike in plain memory.
constexpr int64_t kChunkTokens = 16;

TEST(RegionsClientTest, BatchesInRegionsGiveTheBitsOfPayloads) {
  for (const Shape& shape :
       {Shape{}, Shape{.hidden = 7}, Shape{.tokens = 96, .hidden_type = DataType::kBFloat16},
        Shape{.tokens = 96, .hidden = 9, .hidden_type = DataType::kBFloat16, .dx_type = DataType::kBFloat16},
        Shape{.tokens = 64, .hidden = 5, .dx_type = DataType::kFloat16}}) {
    SCOPED_TRACE(::testing::Message()
                 << shape.tokens << " x " << shape.hidden << " " << Name(shape.hidden_type));
    TestServer server(WithRegions());
    const Connected connected(server.target(), shape.hidden);
    connected.WriteWeights();
    Data data(shape);
    const Region region = connected.CreateRegion(data.HiddenBytes() + data.DxBytes() + 64);
    const int64_t dx_at = (data.HiddenBytes() + 15) / 16 * 16 + 16;
    ASSERT_TRUE(region.CopyIn(0, data.hidden.data(), data.HiddenBytes()).ok());
    Session session = connected.Open(kChunkTokens * shape.hidden * SizeOf(shape.hidden_type));
    const auto plain = session.Compute(data.BatchAt(data.hidden.data()), data.OutputsAt(data.dx.data()));
    ASSERT_TRUE(plain.ok()) << plain.status();
    const std::vector<float> losses = std::exchange(data.losses, std::vector<float>(data.losses.size()));
    const uint64_t bytes_in = server.engine().counters().payload_bytes_in;

    const auto shared = session.Compute(data.BatchAt(region.data()), data.OutputsAt(At(region, dx_at)));
    ASSERT_TRUE(shared.ok()) << shared.status();
    // Nothing but labels was sent.
    EXPECT_EQ(server.engine().counters().payload_bytes_in - bytes_in,
              static_cast<uint64_t>(shape.tokens) * 8);
    EXPECT_GT(shared->chunks, 1);
    EXPECT_EQ(shared->loss_sum, plain->loss_sum);
    EXPECT_EQ(data.losses, losses);
    EXPECT_EQ(std::memcmp(At(region, dx_at), data.dx.data(), data.dx.size()), 0);
  }
}

TEST(RegionsClientTest, TheWindowHasTheBitsOfPayloads) {
  const Shape shape{.tokens = 96};
  TestServer server(WithRegions());
  const Connected connected(server.target(), shape.hidden);
  connected.WriteWeights();
  Data data(shape);
  data.LabelAll();
  const Region region = connected.CreateRegion(data.HiddenBytes());
  ASSERT_TRUE(region.CopyIn(0, data.hidden.data(), data.HiddenBytes()).ok());
  Session session = connected.Open(kChunkTokens * shape.hidden * 4);
  ASSERT_TRUE(session.Compute(data.BatchAt(data.hidden.data()), {}).ok());
  const std::vector<float> by_payloads = connected.Flush();
  ASSERT_TRUE(session.Compute(data.BatchAt(region.data()), {}).ok());
  EXPECT_EQ(connected.Flush(), by_payloads);
}

TEST(RegionsClientTest, ATeachersHiddenStatesInARegionGiveTheBitsOfPayloads) {
  constexpr int64_t kTeacherHidden = 7;  // rows that are no multiple of 16 bytes
  const Shape shape{.tokens = 96};
  TestServer server(WithRegions());
  const Connected connected(server.target(), shape.hidden);
  connected.WriteWeights();
  const auto teacher = connected.client->CreateHead({.name = "teacher",
                                                     .vocab_size = kVocab,
                                                     .hidden_size = kTeacherHidden,
                                                     .weight_type = DataType::kFloat32});
  ASSERT_TRUE(teacher.ok()) << teacher.status();
  ASSERT_TRUE(
      teacher->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kTeacherHidden, 2).data()).ok());
  Data data(shape);
  data.LabelAll();
  const std::vector<float> states = RandomFloats(shape.tokens * kTeacherHidden, 8);
  const auto bytes = static_cast<int64_t>(states.size() * sizeof(float));
  const Region region = connected.CreateRegion(data.HiddenBytes() + bytes);
  ASSERT_TRUE(region.CopyIn(0, data.hidden.data(), data.HiddenBytes()).ok());
  ASSERT_TRUE(region.CopyIn(data.HiddenBytes(), states.data(), bytes).ok());
  Session session = connected.Open(kChunkTokens * (shape.hidden + kTeacherHidden) * 4);
  Batch batch = data.BatchAt(data.hidden.data());
  batch.distillation = {.teacher = "teacher", .hidden_size = kTeacherHidden, .hidden_states = states.data()};
  const auto plain = session.Compute(batch, data.OutputsAt(data.dx.data()));
  ASSERT_TRUE(plain.ok()) << plain.status();
  const std::vector<float> by_payloads = connected.Flush();
  const std::vector<std::byte> dx = std::exchange(data.dx, std::vector<std::byte>(data.dx.size()));
  const uint64_t bytes_in = server.engine().counters().payload_bytes_in;

  // The teacher's alone, then both.
  batch.distillation->hidden_states = At(region, data.HiddenBytes());
  for (const void* hidden_states :
       {static_cast<const void*>(data.hidden.data()), static_cast<const void*>(region.data())}) {
    batch.hidden_states = hidden_states;
    const auto shared = session.Compute(batch, data.OutputsAt(data.dx.data()));
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_GT(shared->chunks, 1);
    EXPECT_EQ(shared->divergence_sum, plain->divergence_sum);
    EXPECT_EQ(data.dx, dx);
    EXPECT_EQ(connected.Flush(), by_payloads);
  }
  EXPECT_EQ(server.engine().counters().payload_bytes_in - bytes_in,
            static_cast<uint64_t>(shape.tokens * 2 * 8 + data.HiddenBytes()));

  const absl::Status overlap =
      session.Compute(batch, data.OutputsAt(At(region, data.HiddenBytes() - 16))).status();
  EXPECT_EQ(overlap.code(), absl::StatusCode::kInvalidArgument) << overlap;
}

TEST(RegionsClientTest, ChunksInRegionsTellTheirStages) {
  const Shape shape{.tokens = 96};
  TestServer server(WithRegions());
  const Connected connected(server.target(), shape.hidden);
  connected.WriteWeights();
  Data data(shape);
  const Region region = connected.CreateRegion(data.HiddenBytes() + data.DxBytes());
  ASSERT_TRUE(region.CopyIn(0, data.hidden.data(), data.HiddenBytes()).ok());
  Session session = connected.Open(kChunkTokens * shape.hidden * 4, Timing::kReport);
  const auto result =
      session.Compute(data.BatchAt(region.data()), data.OutputsAt(At(region, data.HiddenBytes())));
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(static_cast<int64_t>(result->timings.size()), shape.tokens / kChunkTokens);
  int64_t next_token = 0;
  for (const ChunkTiming& chunk : result->timings) {
    EXPECT_EQ(chunk.first_token, next_token);
    next_token += chunk.tokens;
    EXPECT_LE(chunk.sent, chunk.received + std::chrono::microseconds(1));
    EXPECT_LE(chunk.received, chunk.started);
    EXPECT_EQ(chunk.started, chunk.input_ready);  // it lies where the CPU reads it
    EXPECT_LE(chunk.input_ready, chunk.computed);
    EXPECT_LE(chunk.computed, chunk.arrived);
  }
  EXPECT_EQ(next_token, shape.tokens);
}

// Regions are not the connection's: what was lost is sent again, from the same memory, and counted once.
TEST(RegionsClientTest, ABatchInARegionSurvivesLostConnections) {
  const Shape shape{.tokens = 400};
  TestServer server(WithRegions());
  const Connected direct(server.target(), shape.hidden);
  direct.WriteWeights();
  Data data(shape);
  data.LabelAll();
  Session undisturbed = direct.Open(kChunkTokens * shape.hidden * 4);
  ASSERT_TRUE(undisturbed.Compute(data.BatchAt(data.hidden.data()), data.OutputsAt(data.dx.data())).ok());
  const std::vector<float> gradient = direct.Flush();

  // The first connection is that of the calls; streams are cut ever later.
  FaultProxy proxy(server.target(), [](int connection) {
    return CutAfter(connection == 0 || connection > 5 ? -1 : 600 + 900 * connection);
  });
  const Connected connected(proxy.target(), shape.hidden);
  const Region region = connected.CreateRegion(data.HiddenBytes() + data.DxBytes());
  ASSERT_TRUE(region.CopyIn(0, data.hidden.data(), data.HiddenBytes()).ok());
  Session session = connected.Open(kChunkTokens * shape.hidden * 4);
  const auto result =
      session.Compute(data.BatchAt(region.data()), data.OutputsAt(At(region, data.HiddenBytes())));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(proxy.faults(), 0);
  EXPECT_EQ(std::memcmp(At(region, data.HiddenBytes()), data.dx.data(), data.dx.size()), 0);
  EXPECT_EQ(connected.Flush(), gradient);
}

TEST(RegionsClientTest, AfterAServersRestartTheRegionIsGoneAndTheErrorSaysSo) {
  const Shape shape;
  const testing::HeldPort port;
  auto options = WithRegions();
  options.server.listen = port.address();
  auto server = std::make_unique<TestServer>(options);
  const Connected connected(server->target(), shape.hidden);
  connected.WriteWeights();
  Data data(shape);
  const Region region = connected.CreateRegion(data.HiddenBytes());
  ASSERT_TRUE(region.CopyIn(0, data.hidden.data(), data.HiddenBytes()).ok());
  server.reset();
  server = std::make_unique<TestServer>(options);
  const Connected again(server->target(), shape.hidden);
  again.WriteWeights();
  Session session = connected.Open(4096);
  const auto result = session.Compute(data.BatchAt(region.data()), {});
  EXPECT_TRUE(absl::IsFailedPrecondition(result.status())) << result.status();
  EXPECT_THAT(result.status().message(), HasSubstr("CreateRegion"));
  // Nothing was sent: the session goes on with another region.
  const Region another = connected.CreateRegion(data.HiddenBytes());
  ASSERT_TRUE(another.CopyIn(0, data.hidden.data(), data.HiddenBytes()).ok());
  EXPECT_TRUE(session.Compute(data.BatchAt(another.data()), {}).ok());
}

TEST(RegionsClientTest, WhatDoesNotFitItsRegionIsRefusedBeforeItIsSent) {
  const Shape shape;
  TestServer server(WithRegions());
  const Connected connected(server.target(), shape.hidden);
  connected.WriteWeights();
  Data data(shape);
  const Region region = connected.CreateRegion(4 * data.HiddenBytes());
  Session session = connected.Open(4096);
  const auto beyond = session.Compute(data.BatchAt(At(region, region.size() - 16)), {});
  EXPECT_TRUE(absl::IsInvalidArgument(beyond.status())) << beyond.status();
  EXPECT_THAT(beyond.status().message(), HasSubstr("hidden_states begins in a region"));
  for (const int64_t shift : {int64_t{0}, int64_t{16}, data.HiddenBytes() - 16}) {
    const auto overlap = session.Compute(data.BatchAt(region.data()), data.OutputsAt(At(region, shift)));
    EXPECT_TRUE(absl::IsInvalidArgument(overlap.status())) << overlap.status();
    EXPECT_THAT(overlap.status().message(), HasSubstr("overlaps"));
  }
  EXPECT_EQ(server.engine().counters().chunks_accumulated, 0U);
  EXPECT_TRUE(absl::IsInvalidArgument(region.CopyIn(region.size(), data.hidden.data(), 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(region.CopyOut(-1, data.hidden.data(), 1)));
}

TEST(RegionsClientTest, WhatIsNotAlignedInItsRegionIsSent) {
  const Shape shape;
  TestServer server(WithRegions());
  const Connected connected(server.target(), shape.hidden);
  connected.WriteWeights();
  Data data(shape);
  const Region region = connected.CreateRegion(data.HiddenBytes() + data.DxBytes() + 64);
  ASSERT_TRUE(region.CopyIn(4, data.hidden.data(), data.HiddenBytes()).ok());
  Session session = connected.Open(1024);
  const auto plain = session.Compute(data.BatchAt(data.hidden.data()), data.OutputsAt(data.dx.data()));
  ASSERT_TRUE(plain.ok()) << plain.status();
  std::byte* const dx = At(region, data.HiddenBytes() + 20);
  const auto sent = session.Compute(data.BatchAt(At(region, 4)), data.OutputsAt(dx));
  ASSERT_TRUE(sent.ok()) << sent.status();
  EXPECT_EQ(sent->loss_sum, plain->loss_sum);
  EXPECT_EQ(std::memcmp(dx, data.dx.data(), data.dx.size()), 0);
}

TEST(RegionsClientTest, WithoutRegionsTheErrorNamesTheFlag) {
  TestServer server;
  const Connected connected(server.target(), 20);
  const auto region = connected.client->CreateRegion(RegionKind::kSystem, 4096);
  EXPECT_TRUE(absl::IsFailedPrecondition(region.status())) << region.status();
  EXPECT_THAT(region.status().message(), HasSubstr("--same_host_regions"));
}

TEST(RegionsClientTest, AFullServerIsNotAskedAgainAndAgain) {
  TestServer server(WithRegions(8 << 10, 8 << 10));
  const Connected connected(server.target(), 20);
  const Region region = connected.CreateRegion(8 << 10);
  const auto refused = connected.client->CreateRegion(RegionKind::kSystem, 4096);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
}

}  // namespace
}  // namespace lossd::regions_client_test
