// Whatever a client does, it does over TLS as well.
#include "server/rpc/transport/tls.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/tls/certificates.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"

namespace lossd::tls_test {
namespace {

using testing::Certificates;
using testing::RandomFloats;
using testing::RandomLabels;
using testing::TestServer;

constexpr int64_t kVocab = 61;
constexpr int64_t kHidden = 20;
constexpr int64_t kTokens = 40;
constexpr int32_t kLanes = 3;
constexpr char kLoopback[] = "DNS:localhost,IP:127.0.0.1";

struct Data {
  std::vector<int64_t> labels = RandomLabels(kTokens, kVocab, 5);
  std::vector<float> hidden = RandomFloats(kTokens * kHidden, 6);
  std::vector<float> losses = std::vector<float>(kTokens, -1.0F);
  std::vector<float> dx = std::vector<float>(kTokens * kHidden, -1.0F);

  absl::StatusOr<BatchResult> Compute(Session& session) {
    return session.Compute({.labels = labels, .hidden_states = hidden.data()},
                           {.losses = losses, .dx = dx.data()});
  }
};

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() {
    files_.MakeAuthority("ca");
    files_.Make("server", "ca", kLoopback);
    files_.Make("client", "ca", "DNS:client");
  }

  std::unique_ptr<TestServer> Serve(const std::string& client_ca = "") {
    testing::TestServerOptions options;
    options.server.tls = {
        .certificate = files_.Certificate("server"), .key = files_.Key("server"), .client_ca = client_ca};
    return std::make_unique<TestServer>(options);
  }

  static std::unique_ptr<Client> Connect(const TestServer& server, const TlsOptions& tls) {
    ClientOptions options;
    options.tls = tls;
    auto client = Client::Connect(server.target(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  // Weights there and back, a session of several lanes, each on a connection of its own, a flush, and the
  // head's end.
  static void DoEverything(TestServer& server, Client& client) {
    auto head = client.CreateHead(
        {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
    ASSERT_TRUE(head.ok()) << head.status();
    const std::vector<float> weights = RandomFloats(kVocab * kHidden, 1);
    ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, weights.data()).ok());
    std::vector<float> read(weights.size());
    ASSERT_TRUE(head->ReadWeights(DataType::kFloat32, read.data()).ok());
    EXPECT_EQ(read, weights);
    auto session = head->OpenSession(
        {.chunk_bytes = 8 * kHidden * static_cast<int64_t>(sizeof(float)), .lanes = kLanes});
    ASSERT_TRUE(session.ok()) << session.status();
    Data data;
    const auto result = data.Compute(*session);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->chunks, kTokens / 8);
    EXPECT_EQ(result->valid_tokens, kTokens);
    EXPECT_EQ(server.engine().counters().live_streams, kLanes);
    const SessionMarks marks = session->marks();
    std::vector<float> gradient(weights.size());
    const auto flush = head->Flush({}, {&marks, 1}, gradient.data());
    ASSERT_TRUE(flush.ok()) << flush.status();
    EXPECT_EQ(flush->window_tokens, static_cast<uint64_t>(kTokens));
    ASSERT_TRUE(session->Close().ok());
    EXPECT_TRUE(client.DeleteHead("head").ok());
  }

  Certificates files_;
};

TEST_F(TlsTest, EveryOperationWorksOverTls) {
  const auto server = Serve();
  const auto client = Connect(*server, {.ca_certificates = files_.Certificate("ca")});
  ASSERT_NE(client, nullptr);
  DoEverything(*server, *client);
}

// A record that TLS cannot read ends the connection as surely as a reset does, but gRPC has another status
// for that.
TEST_F(TlsTest, CallsWhoseBytesAreDamagedOnTheWayAreMadeAgain) {
  const auto server = Serve();
  std::mt19937 random(20261123);
  testing::FaultProxy proxy(server->target(), [&random](int connection) -> std::vector<testing::Fault> {
    return {{.kind = connection % 2 == 0 ? testing::FaultKind::kRepeat : testing::FaultKind::kMirror,
             .after_bytes = 2500 + static_cast<int64_t>(random() % 20000)}};
  });
  ClientOptions options;
  options.tls = TlsOptions{.ca_certificates = files_.Certificate("ca"), .server_name = "localhost"};
  auto client = Client::Connect(proxy.target(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  auto head = (*client)->CreateHead(
      {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<float> weights = RandomFloats(kVocab * kHidden, 1);
  std::vector<float> read(weights.size());
  for (int round = 0; proxy.faults() < 12; ++round) {
    ASSERT_LT(round, 10'000) << "without enough faults";
    const auto written = head->WriteWeights(DataType::kFloat32, weights.data());
    ASSERT_TRUE(written.ok()) << written.status();
    const auto version = head->ReadWeights(DataType::kFloat32, read.data());
    ASSERT_TRUE(version.ok()) << version.status();
    ASSERT_EQ(read, weights);
  }
}

TEST_F(TlsTest, EveryOperationWorksWithClientCertificates) {
  const auto server = Serve(files_.Certificate("ca"));
  const auto client = Connect(*server, {.ca_certificates = files_.Certificate("ca"),
                                        .certificate = files_.Certificate("client"),
                                        .key = files_.Key("client")});
  ASSERT_NE(client, nullptr);
  DoEverything(*server, *client);
}

TEST_F(TlsTest, AServerNameStandsInForTheTargets) {
  files_.Make("server", "ca", "DNS:lossd.example");
  const auto server = Serve();
  const auto client =
      Connect(*server, {.ca_certificates = files_.Certificate("ca"), .server_name = "lossd.example"});
  ASSERT_NE(client, nullptr);
  DoEverything(*server, *client);
}

TEST_F(TlsTest, AReplacedCertificateIsServedToNewConnectionsWhileSessionsGoOn) {
  const auto server = Serve();
  const auto before = Connect(*server, {.ca_certificates = files_.Certificate("ca")});
  ASSERT_NE(before, nullptr);
  auto head = before->CreateHead(
      {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data()).ok());
  auto session = head->OpenSession({});
  ASSERT_TRUE(session.ok()) << session.status();
  Data data;
  ASSERT_TRUE(data.Compute(*session).ok());

  files_.MakeAuthority("new_ca");
  files_.Make("new_server", "new_ca", kLoopback);
  files_.Replace("server", "new_server");
  // The new authority is unknown to what the server showed so far: this works once it shows the new one.
  ClientOptions options;
  options.tls = TlsOptions{.ca_certificates = files_.Certificate("new_ca")};
  absl::StatusOr<std::unique_ptr<Client>> after = absl::UnknownError("");
  testing::Await(
      "the new certificate", [&] { return (after = Client::Connect(server->target(), options)).ok(); },
      std::chrono::milliseconds(50));
  EXPECT_TRUE((*after)->Status().ok());
  EXPECT_TRUE(data.Compute(*session).ok());
  EXPECT_EQ(session->reconnects(), 0);
}

TEST_F(TlsTest, AReplacedClientCertificateIsShownByNewConnections) {
  files_.Make("former_client", "ca", "DNS:client");
  files_.MakeAuthority("client_ca");
  files_.Replace("client_ca", "ca");
  const auto server = Serve(files_.Certificate("client_ca"));
  const TlsOptions tls{.ca_certificates = files_.Certificate("ca"),
                       .certificate = files_.Certificate("client"),
                       .key = files_.Key("client")};
  const auto client = Connect(*server, tls);
  ASSERT_NE(client, nullptr);
  auto head = client->CreateHead(
      {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data()).ok());

  files_.MakeAuthority("new_ca");
  files_.Make("new_client", "new_ca", "DNS:client");
  files_.Replace("client_ca", "new_ca");
  ClientOptions former{.reconnect_timeout = std::chrono::milliseconds(0)};
  former.tls = TlsOptions{.ca_certificates = files_.Certificate("ca"),
                          .certificate = files_.Certificate("former_client"),
                          .key = files_.Key("former_client")};
  testing::Await(
      "the server to see its file", [&] { return !Client::Connect(server->target(), former).ok(); },
      std::chrono::milliseconds(50));
  files_.Replace("client", "new_client");
  // A session's stream is a connection of its own; it is made again until the client has seen its files.
  Data data;
  auto session = head->OpenSession({});
  ASSERT_TRUE(session.ok()) << session.status();
  const auto result = data.Compute(*session);
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(TlsTest, AWatchTellsOfChangedFilesAndOfThoseThatDoNotFit) {
  rpc::TlsWatch watch(
      {.certificate = files_.Certificate("server"), .key = files_.Key("server"), .client_ca = {}});
  EXPECT_FALSE(watch.Poll().has_value());
  const auto before = watch.Poll(rpc::Look::kAnyway);
  ASSERT_TRUE(before.has_value() && before->ok());
  files_.Make("new_server", "ca", kLoopback);
  files_.Replace("server", "new_server");
  const auto renewed = watch.Poll();
  ASSERT_TRUE(renewed.has_value());
  ASSERT_TRUE(renewed->ok()) << renewed->status();
  EXPECT_EQ(rpc::DifferencesOf(**before, **renewed), (std::vector<std::string>{"certificate", "key"}));
  EXPECT_FALSE(watch.Poll().has_value());
  std::filesystem::copy_file(files_.Key("ca"), files_.Key("server"),
                             std::filesystem::copy_options::overwrite_existing);
  const auto half = watch.Poll();
  ASSERT_TRUE(half.has_value());
  EXPECT_TRUE(absl::IsInvalidArgument(half->status())) << half->status();
}

TEST_F(TlsTest, AKeyThatEverybodyCanReadIsWarnedOf) {
  const rpc::TlsFiles files{
      .certificate = files_.Certificate("server"), .key = files_.Key("server"), .client_ca = {}};
  ASSERT_EQ(chmod(files.key.c_str(), 0600), 0);
  auto check = rpc::CheckTls(files);
  ASSERT_TRUE(check.ok()) << check.status();
  EXPECT_TRUE(check->warnings.empty());
  ASSERT_EQ(chmod(files.key.c_str(), 0644), 0);
  check = rpc::CheckTls(files);
  ASSERT_TRUE(check.ok()) << check.status();
  ASSERT_EQ(check->warnings.size(), 1U);
  EXPECT_NE(check->warnings.front().find("chmod"), std::string::npos);
}

}  // namespace
}  // namespace lossd::tls_test
