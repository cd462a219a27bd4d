// How a group notices that it has lost a rank, or its leader.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/group/group_wire.h"
#include "tests/unit/rpc/group_ranks.h"

namespace lossd::rpc::group_loss_test {
namespace {

using kernels::collectives::Code;
using ::testing::AllOf;
using testing::FakeExecutor;
using testing::GroupUnderTest;
using ::testing::HasSubstr;
using testing::Loss;
using testing::Question;
using testing::RunningMember;
using ::testing::StartsWith;
using testing::Told;

constexpr absl::Duration kShort = absl::Seconds(1);

TEST(GroupLoss, ARankThatSaysNothingIsLostAndWhatWaitsForItFails) {
  GroupUnderTest group(3, kShort);
  auto leader = group.Lead();
  const auto stub = group.Stub();
  grpc::ClientContext context;
  ShowToken(group.credentials(), &context);
  const auto silent = stub->Join(&context);
  ASSERT_TRUE(silent->Write(group.Hello(1)));
  FakeExecutor two;
  RunningMember member(group.Join(2), &two);
  const std::shared_ptr<engine::RankChannel> channel = leader->Channel();
  auto asked = std::async(std::launch::async, [&channel] { return channel->Ask(Question(1)); });
  auto met = std::async(std::launch::async, [&leader] {
    std::vector<std::string> all;
    return leader->rendezvous().AllGather("0", std::chrono::minutes(5), &all).code();
  });
  EXPECT_THAT(group.loss().Await(), AllOf(StartsWith("1: "), HasSubstr("silent for 1s")));
  const absl::Status answer = asked.get();
  EXPECT_EQ(answer.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.message()), HasSubstr("rank 1 was lost"));
  EXPECT_EQ(met.get(), Code::kPeerLost);
  EXPECT_EQ(channel->Ask(Question(2)).code(), absl::StatusCode::kUnavailable);
  channel->Send(Told(3));  // goes nowhere
  EXPECT_EQ(leader->AwaitRanks(absl::InfiniteDuration()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(group.loss().times(), 1);
  context.TryCancel();
  (void)silent->Finish();
  leader.reset();
  EXPECT_EQ(member.Await().code(), absl::StatusCode::kUnavailable) << "the group did not end in order";
}

TEST(GroupLoss, ARankWhoseStreamBreaksIsLostAtOnce) {
  GroupUnderTest group(3);
  const auto leader = group.Lead();
  auto one = group.Join(1);
  const auto two = group.Join(2);
  one.reset();
  EXPECT_THAT(group.loss().Await(), AllOf(StartsWith("1: "), HasSubstr("ended")));
  EXPECT_EQ(group.loss().times(), 1);
}

TEST(GroupLoss, ARankThatWaitsForOthersToJoinIsMissedToo) {
  GroupUnderTest group(3);
  const auto leader = group.Lead();
  auto one = group.Join(1);
  auto waiting =
      std::async(std::launch::async, [&leader] { return leader->AwaitRanks(absl::InfiniteDuration()); });
  one.reset();
  EXPECT_EQ(waiting.get().code(), absl::StatusCode::kUnavailable);
}

// A rank of a group of two that says all of it at once.
void ExpectLost(const std::vector<group::v1::MemberMessage>& said, const std::string& why,
                grpc::StatusCode code = grpc::StatusCode::INTERNAL) {
  GroupUnderTest group(2);
  const auto leader = group.Lead();
  const auto stub = group.Stub();
  grpc::ClientContext context;
  ShowToken(group.credentials(), &context);
  const auto stream = stub->Join(&context);
  ASSERT_TRUE(stream->Write(group.Hello(1)));
  for (const group::v1::MemberMessage& message : said) stream->Write(message);
  EXPECT_THAT(group.loss().Await(), HasSubstr(why));
  group::v1::LeaderMessage ignored;
  while (stream->Read(&ignored)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), code);
  EXPECT_EQ(group.loss().times(), 1);
}

group::v1::MemberMessage OfferIn(int64_t round) {
  group::v1::MemberMessage message;
  message.mutable_offer()->set_round(round);
  return message;
}

TEST(GroupLoss, ARankThatTalksNonsenseIsLost) {
  group::v1::MemberMessage message;
  ExpectLost({message}, "says nothing");
  message.mutable_reply()->set_number(99);
  ExpectLost({message}, "command 99");
  ExpectLost({GroupUnderTest(2).Hello(1)}, "hello came twice", grpc::StatusCode::INVALID_ARGUMENT);
  ExpectLost({OfferIn(1), OfferIn(1)}, "second offer in round 1");
  for (const int64_t round : {std::numeric_limits<int64_t>::min(), int64_t{-1}, int64_t{0}, int64_t{2},
                              std::numeric_limits<int64_t>::max()}) {
    ExpectLost({OfferIn(round)}, absl::StrCat("round ", round));
  }
  message.mutable_applied();
  ExpectLost({message}, "more batches than were started");
  message.set_answered(SerializeAnswer({.batch = 1, .chunk = 0, .losses = {}, .returns = {}}));
  ExpectLost({message}, "nobody waits for chunk 0 of batch 1");
  message.set_answered("\x80");
  ExpectLost({message}, "answer has not the members");
  message.set_report("x");
  ExpectLost({message}, "report is no array");
}

TEST(GroupLoss, ARankThatTakesNothingIsLostThoughItSaysThatItIsThere) {
  GroupUnderTest group(2, kShort);
  const auto leader = group.Lead();
  const auto stub = group.Stub();
  grpc::ClientContext context;
  ShowToken(group.credentials(), &context);
  const auto stream = stub->Join(&context);
  ASSERT_TRUE(stream->Write(group.Hello(1)));
  ASSERT_EQ(leader->AwaitRanks(absl::Minutes(5)), absl::OkStatus());
  const std::shared_ptr<engine::RankChannel> channel = leader->Channel();
  for (uint64_t i = 0; i < 64; ++i) channel->Send(testing::Large(i, size_t{1} << 20));
  auto asked = std::async(std::launch::async, [&channel] { return channel->Ask(Question(64)); });
  group::v1::MemberMessage heartbeat;
  heartbeat.mutable_heartbeat();
  while (group.loss().times() == 0 && stream->Write(heartbeat)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_THAT(group.loss().Await(), AllOf(StartsWith("1: "), HasSubstr("took nothing for 1s")));
  EXPECT_EQ(asked.get().code(), absl::StatusCode::kUnavailable);
  context.TryCancel();
  (void)stream->Finish();
}

TEST(GroupLoss, AnErrorOfACommandThatNobodyWaitsForEndsTheRank) {
  GroupUnderTest group(2);
  const auto leader = group.Lead();
  FakeExecutor one([](const engine::GroupCommand& /*command*/) { return absl::DataLossError("broken"); });
  auto member = std::make_unique<RunningMember>(group.Join(1), &one);
  leader->Channel()->Send(Told(1));
  EXPECT_EQ(member->Await(), absl::DataLossError("broken"));
  member.reset();
  EXPECT_THAT(group.loss().Await(), StartsWith("1: "));
}

TEST(GroupLoss, ACommandMayTakeLongerThanARankMayBeSilent) {
  const absl::Duration timeout = absl::Seconds(2);
  GroupUnderTest group(2, timeout);
  const auto leader = group.Lead();
  FakeExecutor one([timeout](const engine::GroupCommand& /*command*/) {
    std::this_thread::sleep_for(absl::ToChronoNanoseconds(2 * timeout));
    return absl::OkStatus();
  });
  RunningMember member(group.Join(1), &one);
  EXPECT_EQ(leader->Channel()->Ask(Question(1)), absl::OkStatus());
  EXPECT_EQ(group.loss().times(), 0);
  leader->End();
  EXPECT_EQ(member.Await(), absl::OkStatus());
}

// A leader that welcomes, says what it is told to, and then nothing, or ends the stream.
class FakeLeader final : public group::v1::GroupService::Service {
 public:
  enum class Then { kNothing, kEnds };

  FakeLeader(const std::string& socket, Then then, std::vector<group::v1::LeaderMessage> says = {})
      : then_(then), says_(std::move(says)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeLeader() override { server_->Shutdown(std::chrono::system_clock::now()); }

  using Stream = grpc::ServerReaderWriter<group::v1::LeaderMessage, group::v1::MemberMessage>;
  grpc::Status Join(grpc::ServerContext* /*context*/, Stream* stream) override {
    group::v1::MemberMessage message;
    stream->Read(&message);
    group::v1::LeaderMessage welcome;
    welcome.mutable_welcome();
    stream->Write(welcome);
    for (const group::v1::LeaderMessage& says : says_) stream->Write(says);
    while (then_ == Then::kNothing && stream->Read(&message)) {
    }
    return {grpc::StatusCode::ABORTED, "no more"};
  }

 private:
  const Then then_;
  const std::vector<group::v1::LeaderMessage> says_;
  std::unique_ptr<grpc::Server> server_;
};

void ExpectLostLeader(FakeLeader::Then then, const std::string& why) {
  GroupUnderTest group(2, kShort);
  const FakeLeader leader(group.socket(), then);
  Loss told;
  GroupMemberOptions options = group.MemberOptions(1);
  options.on_lost = [&told](const absl::Status& status) { told.Tell(0, std::string(status.message())); };
  FakeExecutor executor;
  const auto member = GroupMember::Join(options);
  ASSERT_TRUE(member.ok()) << member.status();
  const absl::Status ended = (*member)->Run(executor);
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(ended.message()), AllOf(HasSubstr("rank 0"), HasSubstr(why)));
  EXPECT_THAT(told.Await(), HasSubstr(why));
  std::vector<std::string> all;
  EXPECT_EQ((*member)->rendezvous().AllGather("1", std::chrono::minutes(5), &all).code(), Code::kPeerLost);
}

TEST(GroupLoss, ALeaderThatSaysNothingIsLost) {
  ExpectLostLeader(FakeLeader::Then::kNothing, "silent for 1s");
}

TEST(GroupLoss, ALeaderThatGoesWithoutAnEndInOrderIsLost) {
  ExpectLostLeader(FakeLeader::Then::kEnds, "no more");
}

TEST(GroupLoss, ALeaderOfReplicasIsToldAsOneOfThem) {
  GroupUnderTest group(2);
  group.identity().member = "replica";
  const FakeLeader leader(group.socket(), FakeLeader::Then::kEnds);
  FakeExecutor executor;
  EXPECT_THAT(std::string(group.Join(1)->Run(executor).message()),
              StartsWith("the leader (replica 0) was lost: "));
}

TEST(GroupLoss, ALeaderThatTalksNonsenseEndsTheRank) {
  std::vector<group::v1::LeaderMessage> says(4);  // the last one says nothing
  says[0].mutable_gathered()->set_round(-7);
  says[1].mutable_waiting()->add_missing(1 << 30);
  says[2].mutable_welcome();
  says.emplace_back().mutable_command()->set_number(std::numeric_limits<uint64_t>::max());  // and no bytes
  GroupUnderTest group(2);
  const FakeLeader leader(group.socket(), FakeLeader::Then::kNothing, says);
  FakeExecutor executor;
  const auto member = group.Join(1);
  EXPECT_EQ(member->Run(executor).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(executor.executed().empty());
}

TEST(GroupLoss, ALostLeaderIsNoticedInTheMiddleOfACommand) {
  GroupUnderTest group(2);
  auto leader = std::make_unique<FakeLeader>(group.socket(), FakeLeader::Then::kNothing);
  Loss told;
  GroupMemberOptions options = group.MemberOptions(1);
  options.on_lost = [&told](const absl::Status& status) { told.Tell(0, std::string(status.message())); };
  const auto member = GroupMember::Join(options);
  ASSERT_TRUE(member.ok()) << member.status();
  leader.reset();
  EXPECT_THAT(told.Await(), HasSubstr("rank 0"));  // though nobody is in Run
}

}  // namespace
}  // namespace lossd::rpc::group_loss_test
