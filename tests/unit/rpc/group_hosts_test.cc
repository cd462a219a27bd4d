// The control of a group over TCP: addresses, epochs, certificates, strangers, and networks that lose one
// direction.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rpc/transport/file_descriptor.h"
#include "server/rpc/transport/listener.h"
#include "tests/integration/tls/certificates.h"
#include "tests/support/wait.h"
#include "tests/unit/rpc/group_ranks.h"
#include "tests/unit/rpc/one_way_relay.h"

namespace lossd::rpc::group_hosts_test {
namespace {

using ::testing::AllOf;
using testing::FakeExecutor;
using testing::GroupUnderTest;
using ::testing::HasSubstr;
using testing::Loss;
using ::testing::Not;
using testing::OneWayRelay;
using testing::Question;
using testing::RunningMember;
using ::testing::StartsWith;

constexpr absl::Duration kLong = absl::Minutes(5);
constexpr char kLoopback[] = "127.0.0.1:0";

// A group at a free port of loopback.
class Hosts : public GroupUnderTest {
 public:
  explicit Hosts(int32_t ranks, absl::Duration rank_timeout = absl::Seconds(60))
      : GroupUnderTest(ranks, rank_timeout) {
    set_address(kLoopback);
  }
  int port() const { return std::stoi(address().substr(address().rfind(':') + 1)); }
};

bool HasIpv6() {
  const FileDescriptor file(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  return file.valid() && bind(file.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

TEST(GroupHosts, RanksComeByNameAndByBothKindsOfAddress) {
  for (const std::string address : {"localhost:0", "127.0.0.1:0", "[::1]:0"}) {
    if (address == "[::1]:0" && !HasIpv6()) continue;
    GroupUnderTest group(2);
    group.set_address(address);
    const auto leader = group.Lead();
    ASSERT_GT(leader->port(), 0);
    FakeExecutor one;
    RunningMember member(group.Join(1), &one);
    EXPECT_EQ(leader->Channel()->Ask(Question(1)), absl::OkStatus()) << address;
    leader->End();
    EXPECT_EQ(member.Await(), absl::OkStatus());
  }
}

TEST(GroupHosts, APortThatIsInUseIsNamed) {
  Hosts group(2);
  const auto leader = group.Lead();
  const auto second = GroupLeader::Start(group.LeaderOptions());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(group.address()));
}

TEST(GroupHosts, ANameThatNobodyKnowsIsSaidWhenTheTimeIsOver) {
  Hosts group(2);
  GroupMemberOptions options = group.MemberOptions(1);
  options.address = "no-such-host.invalid:50053";
  options.start_timeout = absl::Seconds(1);
  const absl::Status status = GroupMember::Join(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1"), HasSubstr("does not know the name no-such-host.invalid"),
                    HasSubstr("--group_leader")));
}

// Answers whoever connects as a web server does that was told nonsense.
class WebServer {
 public:
  WebServer() : listener_(Listener::Open("127.0.0.1:0").value()), thread_([this] { Serve(); }) {}
  ~WebServer() {
    shutdown(socket(), SHUT_RDWR);
    thread_.join();
  }
  WebServer(const WebServer&) = delete;
  WebServer& operator=(const WebServer&) = delete;

  std::string address() const { return absl::StrCat("127.0.0.1:", listener_->port()); }

 private:
  int socket() const { return listener_->sockets().front().get(); }
  void Serve() {
    constexpr std::string_view kAnswer = "HTTP/1.0 400 Bad Request\r\n\r\n";
    for (pollfd waits{socket(), POLLIN, 0}; poll(&waits, 1, -1) == 1 && (waits.revents & POLLHUP) == 0;) {
      const FileDescriptor client(accept(socket(), nullptr, nullptr));
      if (!client.valid() || write(client.get(), kAnswer.data(), kAnswer.size()) < 0) continue;
      shutdown(client.get(), SHUT_WR);
      for (char some = 0; read(client.get(), &some, 1) > 0;) {  // else it would be told of a reset alone
      }
    }
  }

  const std::unique_ptr<Listener> listener_;
  std::thread thread_;
};

TEST(GroupHosts, WhyALeaderIsNotFoundIsSaidWhileItIsLookedForAndWhoAsksMayEndThat) {
  Hosts group(2);
  group.set_address(kLoopback);
  { const auto leader = group.Lead(); }  // whose port is nobody's now
  const WebServer stranger;
  for (const auto& [address, words] :
       {std::pair<std::string, std::string>{"no-such-host.invalid:50053", "does not know the name"},
        {group.address(), "is the leader started"},
        {stranger.address(), "is no lossd"}}) {
    GroupMemberOptions options = group.MemberOptions(1);
    options.address = address;
    options.start_timeout = kLong;
    options.on_waiting = [&](const std::string& why) { return why.find(words) == std::string::npos; };
    const absl::Status ended = GroupMember::Join(options).status();
    EXPECT_EQ(ended.code(), absl::StatusCode::kCancelled) << ended;
  }
}

TEST(GroupHosts, EachLeaderHasAnEpochOfItsOwnThatRanksLearn) {
  Hosts group(2);
  group.identity().epoch = 0;
  int64_t before = 0;
  for (int i = 0; i < 2; ++i) {
    group.set_address(kLoopback);
    const auto leader = group.Lead();
    EXPECT_GT(leader->epoch(), 0);
    EXPECT_NE(leader->epoch(), before);
    before = leader->epoch();
    const auto member = group.Join(1);
    EXPECT_EQ(member->epoch(), leader->epoch());
    EXPECT_EQ(leader->Channel()->Report().epoch, leader->epoch());
    group::v1::MemberMessage of_another = group.Hello(1);
    of_another.mutable_hello()->set_epoch(leader->epoch() + 1);
    EXPECT_EQ(group.Refusal(of_another).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  }
}

TEST(GroupHosts, OfTwoRanksWithOneNumberTheSecondIsToldWhereTheFirstIs) {
  Hosts group(3, absl::Seconds(1));
  const auto leader = group.Lead();
  FakeExecutor one;
  RunningMember first(group.Join(1), &one);
  const absl::Status second = GroupMember::Join(group.MemberOptions(1)).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.message()), AllOf(HasSubstr("is 1"), HasSubstr("from 127.0.0.1:")));
  FakeExecutor two;
  RunningMember other(group.Join(2), &two);
  EXPECT_EQ(leader->Channel()->Ask(Question(1)), absl::OkStatus()) << "the first one goes on";
  leader->End();
  EXPECT_EQ(first.Await(), absl::OkStatus());
  EXPECT_EQ(other.Await(), absl::OkStatus());
  EXPECT_EQ(group.loss().times(), 0);
}

TEST(GroupHosts, ARankWhoseGroupHasLostAnotherWaitsForTheNextLeader) {
  Hosts group(3);
  group.identity().epoch = 0;
  auto leader = group.Lead();
  group.Join(1).reset();
  EXPECT_THAT(group.loss().Await(), StartsWith("1: "));
  EXPECT_EQ(group.Refusal(group.Hello(1)).error_code(), grpc::StatusCode::UNAVAILABLE);
  auto joining = std::async(std::launch::async, [&group] { return group.Join(1); });
  EXPECT_EQ(joining.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  leader.reset();
  leader = group.Lead();
  EXPECT_EQ(joining.get()->epoch(), leader->epoch());
}

TEST(GroupHosts, RanksHearWhetherTheLeaderServesEachTimeThatItChanges) {
  Hosts group(2);
  const auto leader = group.Lead();
  std::vector<Serving> heard;
  std::atomic<size_t> times = 0;
  GroupMemberOptions options = group.MemberOptions(1);
  options.on_serving = [&](Serving serving) {
    heard.push_back(serving);
    ++times;
  };
  auto joined = GroupMember::Join(options);
  ASSERT_TRUE(joined.ok()) << joined.status();
  FakeExecutor one;
  RunningMember member(*std::move(joined), &one);
  EXPECT_EQ(member.member().serving(), Serving::kNotYet);
  for (const bool ready : {true, true, false, false, true}) leader->SetServing(ready);
  lossd::testing::Await("three changes", [&] { return times >= 3; });
  EXPECT_EQ(member.member().serving(), Serving::kReady);
  leader->SetServing(false);
  leader->End();
  leader->SetServing(true);
  EXPECT_EQ(member.Await(), absl::OkStatus());
  EXPECT_EQ(heard,
            (std::vector<Serving>{Serving::kReady, Serving::kNotReady, Serving::kReady, Serving::kNotReady}));
}

TEST(GroupHosts, RanksHearThatTheLeaderDrainsAndThatItIsNeverReadyAgain) {
  Hosts group(2);
  const auto leader = group.Lead();
  FakeExecutor one;
  RunningMember member(group.Join(1), &one);
  leader->SetServing(true);
  leader->TellDraining();
  leader->SetServing(true);
  EXPECT_EQ(leader->Channel()->Ask(Question(1)), absl::OkStatus()) << "commands go on";
  EXPECT_EQ(member.member().serving(), Serving::kDraining);
  leader->End();
  EXPECT_EQ(member.Await(), absl::OkStatus());
}

TEST(GroupHosts, TheLeaderIsToldOnceThatTheGroupShallEnd) {
  Hosts group(3);
  std::promise<int32_t> asked;
  std::atomic<int> times = 0;
  GroupLeaderOptions options = group.LeaderOptions();
  options.on_drain = [&](int32_t rank) {
    if (++times == 1) asked.set_value(rank);
  };
  const auto leader = group.Lead(options);
  FakeExecutor executors[2];
  RunningMember one(group.Join(1), &executors[0]);
  RunningMember two(group.Join(2), &executors[1]);
  two.member().RequestDrain();
  EXPECT_EQ(asked.get_future().get(), 2);
  one.member().RequestDrain();
  two.member().RequestDrain();
  EXPECT_EQ(leader->Channel()->Ask(Question(1)), absl::OkStatus()) << "nothing else has changed";
  leader->End();
  EXPECT_EQ(one.Await(), absl::OkStatus());
  EXPECT_EQ(two.Await(), absl::OkStatus());
  EXPECT_EQ(times, 1);
}

// Certificates

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Those of a node called `name`; what it trusts is `ca`.
GroupCredentials Of(const lossd::testing::Certificates& files, const std::string& name,
                    const std::string& ca) {
  return {.token = "",
          .certificate = Read(files.Certificate(name)),
          .key = Read(files.Key(name)),
          .ca = Read(files.Certificate(ca))};
}

// The same certificate, which now ended an hour ago; its signature is no longer good.
std::string Expired(const std::string& pem) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> from(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509(from.get(), nullptr, nullptr, nullptr), X509_free);
  const std::unique_ptr<ASN1_TIME, decltype(&ASN1_TIME_free)> end(X509_gmtime_adj(nullptr, -3600),
                                                                  ASN1_TIME_free);
  X509_set1_notAfter(certificate.get(), end.get());
  i2d_re_X509_tbs(certificate.get(), nullptr);  // else it is written as it was read
  const std::unique_ptr<BIO, decltype(&BIO_free)> to(BIO_new(BIO_s_mem()), BIO_free);
  PEM_write_bio_X509(to.get(), certificate.get());
  char* text = nullptr;
  const auto size = BIO_get_mem_data(to.get(), &text);
  return {text, static_cast<size_t>(size)};
}

// A folder with two authorities, and a node of each.
const lossd::testing::Certificates& Nodes() {
  static const auto* const nodes = [] {
    auto* made = new lossd::testing::Certificates;
    for (const std::string of : {"group", "others"}) {
      made->MakeAuthority(of);
      made->Make(of + "-node", of, "DNS:a-node-of-" + of);
    }
    return made;
  }();
  return *nodes;
}

TEST(GroupHosts, WhoHasACertificateOfTheGroupBelongsToItAtWhateverAddress) {
  Hosts group(2);
  group.set_credentials(Of(Nodes(), "group-node", "group"));
  const auto leader = group.Lead();
  FakeExecutor one;
  RunningMember member(group.Join(1), &one);
  EXPECT_EQ(leader->Channel()->Ask(Question(1)), absl::OkStatus());
  leader->End();
  EXPECT_EQ(member.Await(), absl::OkStatus());
}

// What a rank with these credentials comes to.
std::string WhyNot(GroupUnderTest& group, const GroupCredentials& credentials) {
  GroupMemberOptions options = group.MemberOptions(1);
  options.credentials = credentials;
  options.start_timeout = absl::Seconds(2);
  const absl::Status status = GroupMember::Join(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  return std::string(status.message());
}

TEST(GroupHosts, WithoutACertificateOfTheGroupNobodyGetsInAndTheRankSaysWhatIsWrong) {
  Hosts group(2);
  group.set_credentials(Of(Nodes(), "group-node", "group"));
  const auto leader = group.Lead();
  // It does not trust the leader.
  EXPECT_THAT(WhyNot(group, Of(Nodes(), "others-node", "others")),
              AllOf(HasSubstr("certificate verify failed"), HasSubstr("(--group_tls_ca is not")));
  // The leader does not trust it.
  EXPECT_THAT(WhyNot(group, Of(Nodes(), "others-node", "group")), HasSubstr("the leader's --group_tls_ca"));
  EXPECT_THAT(WhyNot(group, {.token = "a secret of the group"}), HasSubstr("--group_tls_certificate"));
  EXPECT_EQ(leader->AwaitRanks(absl::ZeroDuration()).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(group.loss().times(), 0);
}

TEST(GroupHosts, ARankWithACertificateSaysThatTheLeaderHasNone) {
  Hosts group(2);
  const auto leader = group.Lead();
  EXPECT_THAT(WhyNot(group, Of(Nodes(), "group-node", "group")), HasSubstr("--group_tls_certificate"));
}

TEST(GroupHosts, ATokenIsWantedBesideACertificate) {
  Hosts group(2);
  GroupCredentials both = Of(Nodes(), "group-node", "group");
  both.token = "a secret of the group";
  group.set_credentials(both);
  const auto leader = group.Lead();
  GroupMemberOptions options = group.MemberOptions(1);
  options.credentials.token = "another secret altogether";
  EXPECT_EQ(GroupMember::Join(options).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(GroupMember::Join(group.MemberOptions(1)).ok());
}

TEST(GroupHosts, CredentialsThatCannotWorkAreRefusedByTheNameOfTheirFlag) {
  const GroupCredentials good = Of(Nodes(), "group-node", "group");
  ASSERT_EQ(CheckCredentials(good), absl::OkStatus());
  ASSERT_EQ(CheckCredentials({.token = "alone"}), absl::OkStatus());
  struct Case {
    std::string GroupCredentials::*part;
    std::string value;
    const char* flag;
  };
  const std::vector<Case> cases = {
      {&GroupCredentials::certificate, "", "--group_tls_certificate needs"},
      {&GroupCredentials::key, "", "--group_tls_key"},
      {&GroupCredentials::ca, "", "--group_tls_ca"},
      {&GroupCredentials::certificate, "nonsense", "--group_tls_certificate holds no certificate"},
      {&GroupCredentials::ca, "nonsense", "--group_tls_ca holds no certificate"},
      {&GroupCredentials::key, good.certificate, "--group_tls_key holds no private key"},
      {&GroupCredentials::key, Read(Nodes().Key("others-node")), "--group_tls_key is not the key"},
  };
  for (const Case& each : cases) {
    GroupCredentials bad = good;
    bad.*each.part = each.value;
    Hosts group(2);
    group.set_credentials(bad);
    const absl::Status leads = GroupLeader::Start(group.LeaderOptions()).status();
    EXPECT_EQ(leads.code(), absl::StatusCode::kInvalidArgument) << each.flag;
    EXPECT_THAT(std::string(leads.message()), HasSubstr(each.flag));
    EXPECT_THAT(std::string(leads.message()), Not(HasSubstr("BEGIN PRIVATE KEY-----\nM")));
    EXPECT_EQ(GroupMember::Join(group.MemberOptions(1)).status(), leads);
  }
}

TEST(GroupHosts, OfSeveralAuthoritiesOneMayHaveExpired) {
  const GroupCredentials good = Of(Nodes(), "group-node", "group");
  GroupCredentials both = good;
  both.ca = Expired(Read(Nodes().Certificate("others"))) + good.ca;
  EXPECT_EQ(CheckCredentials(both), absl::OkStatus());
  for (const auto part : {&GroupCredentials::certificate, &GroupCredentials::ca}) {
    GroupCredentials bad = good;
    bad.*part = Expired(good.*part);
    const absl::Status status = CheckCredentials(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("expired at"));
  }
}

// Strangers

FileDescriptor ConnectTo(int port) {
  FileDescriptor file(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(file.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return file;
}

// Until the other end has closed it.
void AwaitClosed(const FileDescriptor& connection) {
  char byte = 0;
  while (recv(connection.get(), &byte, 1, 0) > 0) {
  }
}

// A call that says nothing.
struct SilentCall {
  explicit SilentCall(const GroupUnderTest& group) : stub(group.Stub()) {
    ShowToken(group.credentials(), &context);
    stream = stub->Join(&context);
  }
  std::unique_ptr<group::v1::GroupService::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<group::v1::MemberMessage, group::v1::LeaderMessage>> stream;
};

TEST(GroupHosts, WhoSaysNothingIsCutOff) {
  Hosts group(2);
  GroupLeaderOptions options = group.LeaderOptions();
  options.hello_timeout = absl::Seconds(1);
  const auto leader = group.Lead(options);
  const FileDescriptor connection = ConnectTo(group.port());
  const SilentCall call(group);
  AwaitClosed(connection);
  EXPECT_EQ(call.stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(group.loss().times(), 0);
}

TEST(GroupHosts, FewAtATimeMayHaveYetToSayHelloAndARankComesAgain) {
  Hosts group(2);
  const auto leader = group.Lead();
  std::vector<std::unique_ptr<SilentCall>> calls;
  for (int i = 0; i < 64; ++i) calls.push_back(std::make_unique<SilentCall>(group));
  while (group.Refusal(group.Hello(7)).error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) {
  }
  auto joining = std::async(std::launch::async, [&group] { return group.Join(1); });
  EXPECT_EQ(joining.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  for (const auto& call : calls) call->context.TryCancel();
  const auto member = joining.get();
  EXPECT_EQ(leader->AwaitRanks(kLong), absl::OkStatus());
}

TEST(GroupHosts, NothingOfAStrangerIsReadNorAnythingLargeOfAnybody) {
  Hosts group(2);
  const auto leader = group.Lead();
  group::v1::MemberMessage large = group.Hello(1);
  large.mutable_hello()->set_version(std::string(size_t{24} << 20, 'x'));
  EXPECT_EQ(group.Refusal(large, "a stranger's").error_code(), grpc::StatusCode::PERMISSION_DENIED);
  const grpc::Status refusal = group.Refusal(large);
  EXPECT_EQ(refusal.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refusal.error_message(), HasSubstr("at most 65536"));
  const auto member = group.Join(1);
  EXPECT_EQ(leader->AwaitRanks(kLong), absl::OkStatus());
  EXPECT_EQ(group.loss().times(), 0);
}

// What a method comes to that takes an empty message.
grpc::Status Call(const std::string& address, const std::string& method) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status;
}

TEST(GroupHosts, WhatOtherServersOfTheProcessServeIsNotServedHere) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  Hosts group(2);
  const auto leader = group.Lead();
  for (const char* const method :
       {"/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}) {
    EXPECT_EQ(Call(group.address(), method).error_code(), grpc::StatusCode::UNIMPLEMENTED) << method;
  }
  grpc::EnableDefaultHealthCheckService(false);
}

// Networks

struct Relayed {
  explicit Relayed(Hosts& group) : leader(group.Lead()), relay(group.port()) {
    GroupMemberOptions options = group.MemberOptions(1);
    options.address = relay.address();
    options.on_lost = [this](const absl::Status& why) { told.Tell(0, std::string(why.message())); };
    auto joined = GroupMember::Join(options);
    if (!joined.ok()) std::abort();
    member.emplace(*std::move(joined), &executor);
    if (!leader->AwaitReports(kLong).ok()) std::abort();
  }

  Loss told;  // to the rank
  std::unique_ptr<GroupLeader> leader;
  OneWayRelay relay;
  FakeExecutor executor;
  std::optional<RunningMember> member;
};

TEST(GroupHosts, BothEndsNoticeThatTheRankNoLongerHearsItsLeader) {
  Hosts group(2, absl::Seconds(1));
  Relayed relayed(group);
  relayed.relay.SilenceServer();
  EXPECT_THAT(relayed.told.Await(), HasSubstr("silent for 1s"));
  EXPECT_THAT(group.loss().Await(), StartsWith("1: "));
  EXPECT_EQ(relayed.member->Await().code(), absl::StatusCode::kUnavailable);
}

TEST(GroupHosts, BothEndsNoticeThatTheLeaderNoLongerHearsTheRank) {
  Hosts group(2, absl::Seconds(1));
  Relayed relayed(group);
  relayed.relay.SilenceClient();
  EXPECT_THAT(group.loss().Await(), AllOf(StartsWith("1: "), HasSubstr("silent for 1s")));
  EXPECT_THAT(relayed.told.Await(), HasSubstr("rank 0"));
  EXPECT_EQ(relayed.member->Await().code(), absl::StatusCode::kUnavailable);
}

TEST(GroupHosts, BothEndsNoticeThatNeitherHearsTheOther) {
  Hosts group(2, absl::Seconds(1));
  Relayed relayed(group);
  relayed.relay.SilenceServer();
  relayed.relay.SilenceClient();
  EXPECT_THAT(group.loss().Await(), AllOf(StartsWith("1: "), HasSubstr("silent for 1s")));
  EXPECT_THAT(relayed.told.Await(), HasSubstr("silent for 1s"));
}

}  // namespace
}  // namespace lossd::rpc::group_hosts_test
