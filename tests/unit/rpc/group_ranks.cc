#include "tests/unit/rpc/group_ranks.h"

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lossd::rpc::testing {

engine::GroupCommand Question(uint64_t number) { return engine::PrepareTeacherCommand{.head = number}; }
engine::GroupCommand Taking(uint64_t number) {
  return engine::CreateHeadCommand{number, {"h", 4, 4, kernels::DataType::kFloat32}};
}
engine::GroupCommand Told(uint64_t number) { return engine::DeleteHeadCommand{.head = number}; }
engine::GroupCommand Large(uint64_t number, size_t bytes) {
  return engine::WriteRowsCommand{.head = number, .tensor = std::string(bytes, 'x')};
}

engine::GroupCommand Beside(uint64_t number) {
  return engine::ConnectReplicasCommand{.connection = number, .network = {}};
}
engine::GroupCommand Interrupting(uint64_t number) { return engine::AbortReplicasCommand{number}; }

uint64_t NumberOf(const engine::GroupCommand& command) {
  if (const auto* beside = std::get_if<engine::ConnectReplicasCommand>(&command)) return beside->connection;
  if (const auto* abort = std::get_if<engine::AbortReplicasCommand>(&command)) return abort->connection;
  if (const auto* question = std::get_if<engine::PrepareTeacherCommand>(&command)) return question->head;
  if (const auto* taking = std::get_if<engine::CreateHeadCommand>(&command)) return taking->head;
  if (const auto* large = std::get_if<engine::WriteRowsCommand>(&command)) return large->head;
  if (const auto* batch = std::get_if<engine::StartBatchCommand>(&command)) return batch->head;
  return std::get<engine::DeleteHeadCommand>(command).head;
}

void Loss::Tell(int32_t rank, const std::string& why) {
  const engine::MutexLock lock(mutex_);
  told_ = absl::StrCat(rank, ": ", why);
  ++times_;
  changed_.NotifyAll();
}

std::string Loss::Await() {
  const engine::MutexLock lock(mutex_);
  while (times_ == 0) changed_.Wait(mutex_);
  return told_;
}

int Loss::times() {
  const engine::MutexLock lock(mutex_);
  return times_;
}

absl::Status FakeExecutor::Execute(engine::GroupCommand command) {
  {
    const engine::MutexLock lock(mutex_);
    executed_.push_back(NumberOf(command));
  }
  const bool batch = std::holds_alternative<engine::StartBatchCommand>(command);
  absl::Status done = do_ == nullptr ? absl::OkStatus() : do_(command);
  if (batch && done.ok()) {
    const engine::MutexLock lock(mutex_);
    ++batches_.started;
    ++batches_.applied;
  }
  return done;
}

absl::StatusOr<engine::BatchProgress> FakeExecutor::Poll() {
  const engine::MutexLock lock(mutex_);
  return batches_;
}

engine::RankReport FakeExecutor::Report() const {
  const engine::MutexLock lock(mutex_);
  return report_;
}

void FakeExecutor::set_report(engine::RankReport report) {
  const engine::MutexLock lock(mutex_);
  report_ = std::move(report);
}

std::vector<uint64_t> FakeExecutor::executed() {
  const engine::MutexLock lock(mutex_);
  return executed_;
}

GroupUnderTest::GroupUnderTest(int32_t ranks, absl::Duration rank_timeout)
    : folder_((std::filesystem::temp_directory_path() / "lossd-ranks-XXXXXX").string()),
      identity_{.epoch = 7,
                .ranks = ranks,
                .version = "1.2.3",
                .device_kind = "cpu",
                .agreed = {{"rank_timeout", "10s"}}},
      rank_timeout_(rank_timeout) {
  if (mkdtemp(folder_.data()) == nullptr) std::abort();
  address_ = "unix:" + socket();
}

GroupUnderTest::~GroupUnderTest() { std::filesystem::remove_all(folder_); }

GroupLeaderOptions GroupUnderTest::LeaderOptions() {
  return {.address = address(),
          .credentials = credentials_,
          .identity = identity_,
          .rank_timeout = rank_timeout_,
          .on_lost = [this](int32_t rank, const std::string& why) { loss_.Tell(rank, why); }};
}

std::unique_ptr<GroupLeader> GroupUnderTest::Lead(GroupLeaderOptions options) {
  auto leader = GroupLeader::Start(std::move(options));
  if (!leader.ok()) {
    std::cerr << leader.status() << "\n";
    std::abort();
  }
  if (absl::EndsWith(address_, ":0")) {
    address_ = absl::StrCat(address_.substr(0, address_.size() - 1), (*leader)->port());
  }
  return *std::move(leader);
}

GroupMemberOptions GroupUnderTest::MemberOptions(int32_t rank) {
  return {.address = address(),
          .credentials = credentials_,
          .identity = identity_,
          .rank = rank,
          .start_timeout = absl::Minutes(5),
          .rank_timeout = rank_timeout_,
          .on_lost = {}};
}

std::unique_ptr<GroupMember> GroupUnderTest::Join(int32_t rank) {
  auto member = GroupMember::Join(MemberOptions(rank));
  if (member.ok()) return *std::move(member);
  std::cerr << member.status() << "\n";
  std::abort();
}

group::v1::MemberMessage GroupUnderTest::Hello(int32_t rank) const {
  group::v1::MemberMessage message;
  group::v1::Hello& hello = *message.mutable_hello();
  hello.set_epoch(identity_.epoch);
  hello.set_rank(rank);
  hello.set_ranks(identity_.ranks);
  hello.set_version(identity_.version);
  hello.set_device_kind(identity_.device_kind);
  hello.mutable_agreed()->insert(identity_.agreed.begin(), identity_.agreed.end());
  return message;
}

std::unique_ptr<group::v1::GroupService::Stub> GroupUnderTest::Stub() const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return group::v1::GroupService::NewStub(
      grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments));
}

grpc::Status GroupUnderTest::Refusal(const group::v1::MemberMessage& hello, const std::string& token) const {
  const auto stub = Stub();
  grpc::ClientContext context;
  ShowToken({.token = token}, &context);
  const auto stream = stub->Join(&context);
  stream->Write(hello);
  group::v1::LeaderMessage answer;
  if (stream->Read(&answer)) context.TryCancel();  // it was welcomed
  return stream->Finish();
}

}  // namespace lossd::rpc::testing
