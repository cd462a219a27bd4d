// Several addresses of one connection: how they are written, and what happens where one cannot be reached.
#include "client/src/connection/replica_channels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lossd/client.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/support/wait.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/session_fixture.h"

namespace lossd::replica_channels_test {
namespace {

using internal::SplitTargets;
using testing::Data;
using ::testing::ElementsAre;
using testing::FakeServer;
using testing::Fate;
using ::testing::HasSubstr;

using std::chrono::seconds;

TEST(SplitTargetsTest, OneIsAListOfOne) {
  EXPECT_THAT(SplitTargets("host:50051").value(), ElementsAre("host:50051"));
  EXPECT_THAT(SplitTargets("dns:///host:50051").value(), ElementsAre("dns:///host:50051"));
  EXPECT_THAT(SplitTargets("unix:/run/a b.sock").value(), ElementsAre("unix:/run/a b.sock"));
}

TEST(SplitTargetsTest, CommasStandBetweenSeveral) {
  EXPECT_THAT(SplitTargets("a:1,b:2,unix:/run/c").value(), ElementsAre("a:1", "b:2", "unix:/run/c"));
}

TEST(SplitTargetsTest, GrpcsOwnListsStayWhole) {
  EXPECT_THAT(SplitTargets("ipv4:10.0.0.1:1,10.0.0.2:2").value(), ElementsAre("ipv4:10.0.0.1:1,10.0.0.2:2"));
}

TEST(SplitTargetsTest, WhatIsNoListIsRefusedWithWhatToWrite) {
  for (const char* bad :
       {"", ",", "a:1,", ",a:1", "a:1,,b:2", "a:1, b:2", "a:1;b:2", "a:1 b:2", "a:1,b", "a:1,http://b:2"}) {
    const absl::Status status = SplitTargets(bad).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("host-a:50051,host-b:50051")) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("\"") + bad + "\"")) << bad;
  }
  EXPECT_THAT(std::string(SplitTargets("a:1,b:2,a:1").status().message()), HasSubstr("a:1 twice"));
  EXPECT_THAT(std::string(SplitTargets("a:1,ipv4:10.0.0.1:2").status().message()),
              HasSubstr("leave the scheme out"));
}

// Two servers of the same head, of which `fake_` is the first.
class TwoAddressesTest : public testing::SessionTest {
 protected:
  static constexpr char kNobody[] = "127.0.0.1:1";

  void ConnectTo(const std::string& targets,
                 const ClientOptions& options = {.reconnect_timeout = seconds(20)}) {
    auto client = Client::Connect(targets, options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto head = client_->GetHead(FakeServer::kName);
    ASSERT_TRUE(head.ok()) << head.status();
    head_ = std::make_unique<Head>(*std::move(head));
  }
  std::string both() const { return fake_.target() + "," + other_.target(); }

  FakeServer other_;
};

TEST_F(TwoAddressesTest, WhicheverAnswersIsUsed) {
  ConnectTo(std::string(kNobody) + "," + fake_.target());
  Session session = Open();
  Data data(6);
  ASSERT_TRUE(session.Compute(data.batch(), data.outputs()).ok());
  data.ExpectOutputs();
  EXPECT_EQ(session.lane_places()[0].target, fake_.target());
}

TEST_F(TwoAddressesTest, TheFirstServesAsLongAsItAnswers) {
  ConnectTo(both());
  const Session session = Open();
  EXPECT_EQ(fake_.observed().sessions, 1);
  EXPECT_EQ(other_.observed().sessions, 0);
}

TEST_F(TwoAddressesTest, AnotherOneTakesCallsWhenItGoes) {
  ConnectTo(both());
  fake_.Stop();
  EXPECT_TRUE(client_->Status().ok());
  EXPECT_TRUE(head_->Info().ok());
  EXPECT_TRUE(head_->ApplyStep({}, {}).ok());
  EXPECT_EQ(other_.observed().steps.size(), 1U);
}

TEST_F(TwoAddressesTest, RowsAreReadAndWrittenThereToo) {
  ConnectTo(both());
  fake_.Stop();
  std::vector<float> weights(static_cast<size_t>(FakeServer::kVocab * FakeServer::kHidden), 3.0F);
  ASSERT_TRUE(head_->WriteWeights(DataType::kFloat32, weights.data()).ok());
  EXPECT_EQ(other_.weights(), weights);
  std::vector<float> read(weights.size());
  ASSERT_TRUE(head_->ReadWeights(DataType::kFloat32, read.data()).ok());
  EXPECT_EQ(read, weights);
}

TEST_F(TwoAddressesTest, WhereNobodyAnswersTheErrorNamesAll) {
  const std::string nobody = std::string(kNobody) + ",127.0.0.1:2";
  const auto client = Client::Connect(nobody, {.reconnect_timeout = std::chrono::milliseconds(300)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("gave up on " + nobody));
}

TEST_F(TwoAddressesTest, ATokenGoesToEachOfThem) {
  const std::string file = ::testing::TempDir() + "replica_channels_token";
  std::ofstream(file) << "0123456789abcdef";
  const auto beyond = Client::Connect(fake_.target() + ",host-b.example:50051", {.token_file = file});
  EXPECT_EQ(beyond.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(beyond.status().message()), HasSubstr("would travel to host-b.example:50051"));
  ConnectTo(both(), {.token_file = file});
  // A session whose lanes are at an address of the list: the caller has named who may see the token.
  fake_.BecomeReplica(7, "a");
  other_.BecomeReplica(7, "b");
  fake_.sessions_at = &other_;
  Session session = Open();
  Data data(6);
  const auto result = session.Compute(data.batch(), data.outputs());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(session.lane_places()[0].target, other_.target());
}

// A machine without power answers nothing, and refuses nothing.
TEST_F(TwoAddressesTest, OneThatFallsSilentIsLeftForAnother) {
  std::promise<void> go_on;
  std::promise<void> silent;
  fake_.on_chunk = [&](uint64_t /*sequence*/, int /*attempt*/) {
    silent.set_value();
    testing::Await("the word to go on", go_on);  // with the lock that every call takes
    return Fate::kTake;
  };
  fake_.BecomeReplica(7, "a");
  other_.BecomeReplica(7, "b");
  ConnectTo(both(), {.call_timeout = seconds(1), .reconnect_timeout = seconds(20)});
  auto computing = std::async(std::launch::async, [&] {
    Session session = Open();
    Data data(1);
    return session.Compute(data.batch(), data.outputs()).status();
  });
  testing::Await("the silence", silent);
  const auto status = client_->Status();
  EXPECT_TRUE(status.ok()) << status.status();
  // What it had accepted may be lost with it.
  EXPECT_TRUE(IsWindowLost(testing::Await("the batch", std::move(computing))));
  go_on.set_value();
}

// A host that takes connections and says nothing over them, or the network that swallows them.
TEST_F(TwoAddressesTest, OneWhoseConnectionNeverComesIsLeftForAnother) {
  std::vector<float> weights(static_cast<size_t>(FakeServer::kVocab * FakeServer::kHidden), 2.0F);
  const std::map<std::string, std::function<absl::Status()>> calls = {
      {"a short call", [&] { return client_->Status().status(); }},
      {"a long call", [&] { return head_->CommitFlush("1"); }},
      {"rows read", [&] { return head_->ReadWeights(DataType::kFloat32, weights.data()).status(); }},
      {"rows written", [&] { return head_->WriteWeights(DataType::kFloat32, weights.data()).status(); }}};
  fake_.BecomeReplica(7, "a");
  other_.BecomeReplica(7, "b");
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    std::atomic<bool> stalls = false;
    testing::FaultProxy proxy(fake_.target(), [&](int /*connection*/) {
      std::vector<testing::Fault> plan;
      if (stalls) plan.push_back({.kind = testing::FaultKind::kStall, .time = std::chrono::hours(1)});
      return plan;
    });
    ConnectTo(proxy.target() + "," + other_.target(),
              {.call_timeout = std::chrono::milliseconds(500), .reconnect_timeout = seconds(10)});
    stalls = true;
    proxy.CutAll();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until the client has seen that
    const absl::Status ended = call();
    EXPECT_TRUE(ended.ok() || absl::IsUnimplemented(ended)) << ended;  // the fake server knows no CommitFlush
  }
}

}  // namespace
}  // namespace lossd::replica_channels_test
