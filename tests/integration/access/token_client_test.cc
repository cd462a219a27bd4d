// The client library shows a token, goes on with the next one, and sends none where others could read it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/connection/call_metadata.h"
#include "lossd/client.h"
#include "server/rpc/transport/access.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"
#include "tests/unit/rpc/no_files.h"

namespace lossd::token_client_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::RandomFloats;
using testing::RandomLabels;
using testing::TestServer;

constexpr int64_t kVocab = 31;
constexpr int64_t kHidden = 8;
constexpr int64_t kTokens = 24;
constexpr char kReader[] = "reader-0123456789";
constexpr char kTrainer[] = "trainer-0123456789";
constexpr char kNext[] = "next-0123456789abc";
constexpr char kAdmin[] = "admin-0123456789abc";

class TokenClientTest : public ::testing::Test {
 protected:
  TokenClientTest() : folder_(std::filesystem::temp_directory_path() / "lossd-token-XXXXXX") {
    if (mkdtemp(folder_.data()) == nullptr) std::abort();
    WriteTokens(std::string("read-only ") + kReader + "\ntrainer " + kTrainer + "\nadmin " + kAdmin);
    access_ = *rpc::AccessControl::Create(Path("tokens"), nullptr);
    testing::TestServerOptions options;
    options.server.access = access_;
    options.server.listen = "127.0.0.1:0,unix:" + Path("socket");
    server_ = std::make_unique<TestServer>(options);
  }
  ~TokenClientTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name + ".new")) << text;
    std::filesystem::rename(Path(name + ".new"), Path(name));
    return Path(name);
  }
  void WriteTokens(const std::string& text) const { Write("tokens", text + "\n"); }
  // As the server does it every second.
  void Reread() {
    const auto changed = access_->Poll();
    ASSERT_TRUE(changed.has_value());
    ASSERT_TRUE(changed->ok()) << changed->status();
    server_->server().EndRevokedStreams();
  }

  absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& token_file,
                                                  const std::string& target = "") {
    ClientOptions options{.reconnect_timeout = std::chrono::seconds(20)};
    options.token_file = token_file;
    return Client::Connect(target.empty() ? server_->target() : target, options);
  }

  static absl::StatusOr<Head> MakeHead(Client& client) {
    auto head = client.CreateHead(
        {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
    if (!head.ok()) return head;
    const auto written = head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data());
    if (!written.ok()) return written.status();
    return head;
  }

  static absl::Status Compute(Session& session) {
    const std::vector<int64_t> labels = RandomLabels(kTokens, kVocab, 5);
    const std::vector<float> hidden = RandomFloats(kTokens * kHidden, 6);
    std::vector<float> losses(kTokens);
    return session.Compute({.labels = labels, .hidden_states = hidden.data()}, {.losses = losses}).status();
  }

  std::string folder_;
  std::shared_ptr<rpc::AccessControl> access_;
  std::unique_ptr<TestServer> server_;
};

TEST_F(TokenClientTest, EveryKindOfCallCarriesTheToken) {
  const std::string file = Write("token", std::string(kAdmin) + "\n");
  for (const std::string& target : {server_->target(), "unix:" + Path("socket")}) {
    const auto client = Connect(file, target);
    ASSERT_TRUE(client.ok()) << client.status();
    auto head = MakeHead(**client);
    ASSERT_TRUE(head.ok()) << head.status();
    auto session = head->OpenSession({.lanes = 2});
    ASSERT_TRUE(session.ok()) << session.status();
    ASSERT_TRUE(Compute(*session).ok());
    const SessionMarks marks = session->marks();
    std::vector<float> read(kVocab * kHidden);
    EXPECT_TRUE(head->ReadWeights(DataType::kFloat32, read.data()).ok());
    EXPECT_TRUE(head->Flush({}, {&marks, 1}, read.data()).ok());
    EXPECT_TRUE(session->Close().ok());
    EXPECT_TRUE((*client)->DeleteHead("head").ok());
    EXPECT_TRUE(absl::IsUnimplemented((*client)->Drain())) << "of this server; it was let in";
  }
}

TEST_F(TokenClientTest, WithoutATokenOrWithAWrongOneItEndsAtOnceAndSaysWhatToDo) {
  const auto without = Connect("");
  EXPECT_TRUE(absl::IsUnauthenticated(without.status())) << without.status();
  EXPECT_THAT(std::string(without.status().message()), HasSubstr("--token_file"));
  const auto wrong = Connect(Write("token", "somebody-elses-token"));
  EXPECT_TRUE(absl::IsUnauthenticated(wrong.status())) << wrong.status();
  EXPECT_THAT(wrong.status().ToString(), Not(HasSubstr("somebody")));
}

TEST_F(TokenClientTest, WhatTheRoleMayNotDoIsDenied) {
  const auto reader = Connect(Write("token", kReader));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE((*reader)->Status().ok());
  const auto head = MakeHead(**reader);
  EXPECT_TRUE(absl::IsPermissionDenied(head.status())) << head.status();
  EXPECT_THAT(std::string(head.status().message()), AllOf(HasSubstr("trainer"), HasSubstr("read-only")));
}

TEST_F(TokenClientTest, ASessionGoesOnThroughTheChangeOfItsToken) {
  const auto client = Connect(Write("token", kTrainer));
  ASSERT_TRUE(client.ok()) << client.status();
  auto head = MakeHead(**client);
  ASSERT_TRUE(head.ok()) << head.status();
  auto session = head->OpenSession({});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE(Compute(*session).ok());

  WriteTokens(std::string("trainer ") + kTrainer + "\ntrainer " + kNext);
  Reread();
  Write("token", kNext);
  ASSERT_TRUE(Compute(*session).ok());
  EXPECT_EQ(session->reconnects(), 0) << "its stream is under the former token, which is still good";
  WriteTokens(std::string("trainer ") + kNext);
  Reread();
  ASSERT_TRUE(Compute(*session).ok());
  EXPECT_GE(session->reconnects(), 1);
  EXPECT_TRUE((*client)->Status().ok());
  const SessionMarks marks = session->marks();
  std::vector<float> gradient(kVocab * kHidden);
  const auto flush = head->Flush({}, {&marks, 1}, gradient.data());
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, static_cast<uint64_t>(3 * kTokens)) << "each batch once";

  WriteTokens(std::string("trainer ") + kTrainer);
  Reread();
  const absl::Status ended = Compute(*session);
  EXPECT_TRUE(absl::IsUnauthenticated(ended)) << ended;
}

TEST_F(TokenClientTest, AFileThatBecameNoGoodLeavesTheTokenAsItIs) {
  const std::string file = Write("token", kTrainer);
  const auto client = Connect(file);
  ASSERT_TRUE(client.ok()) << client.status();
  Write("token", "");
  EXPECT_TRUE((*client)->Status().ok());
  std::filesystem::remove(file);
  EXPECT_TRUE((*client)->Status().ok());
}

TEST_F(TokenClientTest, AFileThatCouldNotBeReadIsReadAgainThoughItStaysAsItIs) {
  const auto metadata =
      internal::CallMetadata::Create(server_->target(), {.token_file = Write("token", kTrainer)});
  ASSERT_TRUE(metadata.ok()) << metadata.status();
  const auto call = [&] {
    grpc::ClientContext context;
    return (*metadata)->AddTo(&context);
  };
  const uint64_t first = call();
  Write("token", kNext);
  {
    const testing::NoFileCanBeOpened nothing;
    EXPECT_EQ(call(), first);
  }
  EXPECT_NE(call(), first);
}

// A repeat that finds nothing takes it that the first try did it, but not if that was refused.
TEST_F(TokenClientTest, ADeleteThatWasRefusedForItsTokenHasDoneNothing) {
  const std::string file = Write("token", kAdmin);
  const auto client = Connect(file);
  ASSERT_TRUE(client.ok()) << client.status();
  absl::Status deleted;
  testing::Await("a call with another token", [&] {
    Write("token", "refused-0123456789");
    std::thread writer([&] {
      for (int i = 0; i < 100; ++i) Write("token", absl::StrCat("refused-0123456789-", i));
      Write("token", kAdmin);
    });
    deleted = (*client)->DeleteHead("nothing");
    writer.join();
    return !absl::IsUnauthenticated(deleted);
  });
  EXPECT_TRUE(absl::IsNotFound(deleted)) << deleted;
}

TEST_F(TokenClientTest, AFileThatHoldsNoTokenIsRefusedAndNotRepeated) {
  for (const std::string& text : {std::string(), std::string("trainer ") + kTrainer, std::string(513, 'x'),
                                  std::string(kTrainer) + "\n" + kTrainer, std::string("\x01\x02\x03")}) {
    const absl::Status status = Connect(Write("token", text)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.ToString(), AllOf(HasSubstr(Path("token")), Not(HasSubstr(kTrainer))));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Connect(Path("nowhere")).status()));
}

// Neither is read: there would be no end of it.
TEST_F(TokenClientTest, WhatIsNoRegularFileOrTooLargeIsRefusedAtOnce) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const std::string& path : {Path("pipe"), std::string("/dev/zero"), folder_}) {
    const absl::Status status = Connect(path).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.ToString(), AllOf(HasSubstr(path), HasSubstr("regular file")));
  }
  const absl::Status large = Connect(Write("large", kTrainer + std::string(size_t{1} << 16, '\n'))).status();
  EXPECT_TRUE(absl::IsInvalidArgument(large)) << large;
  EXPECT_THAT(large.ToString(), HasSubstr("65536 bytes"));
}

TEST_F(TokenClientTest, APipeThatTookTheFilesPlaceStopsNoCall) {
  const std::string file = Write("token", kTrainer);
  const auto client = Connect(file);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  std::filesystem::rename(Path("pipe"), file);
  EXPECT_TRUE((*client)->Status().ok());
}

TEST_F(TokenClientTest, NoTokenGoesToAnotherMachineInPlainTextUnlessAsked) {
  ClientOptions options{.reconnect_timeout = std::chrono::milliseconds(1)};
  options.token_file = Write("token", kTrainer);
  const char kElsewhere[] = "lossd.invalid:50051";
  const absl::Status refused = Client::Connect(kElsewhere, options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("--tls_ca"), HasSubstr("token_over_plain_text")));
  options.token_over_plain_text = true;
  EXPECT_TRUE(absl::IsUnavailable(Client::Connect(kElsewhere, options).status()));
}

}  // namespace
}  // namespace lossd::token_client_test
