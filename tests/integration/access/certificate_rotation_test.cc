// Certificates and their authorities are replaced while clients work, over connections that end all the time:
// no call fails, and no token is lost or counted twice.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lossd/client.h"
#include "tests/integration/tls/certificates.h"
#include "tests/proxy/fault_proxy.h"
#include "tests/support/test_server.h"
#include "tests/support/wait.h"

namespace lossd::certificate_rotation_test {
namespace {

using ::testing::AllOf;
using testing::Certificates;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::RandomFloats;
using testing::RandomLabels;
using testing::TestServer;

constexpr int64_t kVocab = 61;
constexpr int64_t kHidden = 16;
constexpr int64_t kTokens = 64;
constexpr int kRotations = 3;
constexpr int kSessions = 2;

// A folder that is replaced as a whole, as Kubernetes does it: by a symbolic link.
class Deployed {
 public:
  Deployed(const Certificates& files, std::string name) : files_(files), name_(std::move(name)) {}

  // `pair`: of which certificate and key; `authorities`: who is trusted.
  void Put(const std::string& pair, const std::vector<std::string>& authorities) {
    const std::string folder = files_.Path(name_ + std::to_string(++version_));
    std::filesystem::create_directory(folder);
    std::filesystem::copy_file(files_.Certificate(pair), folder + "/tls.pem");
    std::filesystem::copy_file(files_.Key(pair), folder + "/tls.key");
    std::ofstream bundle(folder + "/ca.pem");
    for (const std::string& authority : authorities) {
      bundle << std::ifstream(files_.Certificate(authority)).rdbuf();
    }
    bundle.close();
    std::filesystem::create_directory_symlink(folder, files_.Path("next"));
    std::filesystem::rename(files_.Path("next"), files_.Path(name_));
  }
  std::string Path(const std::string& file) const { return files_.Path(name_) + "/" + file; }

 private:
  const Certificates& files_;
  const std::string name_;
  int version_ = 0;
};

class CertificateRotationTest : public ::testing::Test {
 protected:
  CertificateRotationTest() : server_files_(files_, "server"), client_files_(files_, "client") {
    MakeGeneration(0);
    server_files_.Put(Of("server", 0), {Of("ca", 0)});
    client_files_.Put(Of("client", 0), {Of("ca", 0)});
    testing::TestServerOptions options;
    options.server.tls = {.certificate = server_files_.Path("tls.pem"),
                          .key = server_files_.Path("tls.key"),
                          .client_ca = server_files_.Path("ca.pem")};
    options.server.connections = {.max_age = absl::Seconds(1), .max_age_grace = absl::Seconds(1)};
    server_ = std::make_unique<TestServer>(options);
  }

  static std::string Of(const std::string& what, int generation) {
    return what + "-" + std::to_string(generation);
  }
  void MakeGeneration(int generation) {
    files_.MakeAuthority(Of("ca", generation));
    files_.Make(Of("server", generation), Of("ca", generation), "DNS:localhost,IP:127.0.0.1");
    files_.Make(Of("client", generation), Of("ca", generation), "DNS:client");
  }

  absl::StatusOr<std::unique_ptr<Client>> Connect() { return Connect(server_->target()); }
  absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target) {
    ClientOptions options{.reconnect_timeout = std::chrono::minutes(10)};
    options.tls = TlsOptions{.ca_certificates = client_files_.Path("ca.pem"),
                             .certificate = client_files_.Path("tls.pem"),
                             .key = client_files_.Path("tls.key")};
    return Client::Connect(target, options);
  }

  // Whether the server shows what `authority` signed, and lets in `client`.
  bool Accepts(const std::string& authority, const std::string& client) {
    ClientOptions options{.reconnect_timeout = std::chrono::milliseconds(0)};
    options.tls = TlsOptions{.ca_certificates = files_.Certificate(authority),
                             .certificate = files_.Certificate(client),
                             .key = files_.Key(client)};
    return Client::Connect(server_->target(), options).ok();
  }
  void AwaitAccepted(const std::string& authority, const std::string& client, bool accepted = true) {
    testing::Await(
        client + (accepted ? " to be let in" : " to be refused"),
        [&] { return Accepts(authority, client) == accepted; }, std::chrono::milliseconds(50));
  }

  // Whoever connects by then has read what is there now, as who replaces certificates makes sure of.
  void AwaitConnections() {
    const int before = connections_;
    testing::Await("two connections", [&] { return connections_ >= before + 2 || HasFailure(); });
  }

  // Both are trusted, then both are replaced, then only the new one is trusted.
  void Rotate(int from) {
    const int to = from + 1;
    MakeGeneration(to);
    const std::vector<std::string> both = {Of("ca", from), Of("ca", to)};
    client_files_.Put(Of("client", from), both);
    AwaitConnections();
    server_files_.Put(Of("server", from), both);
    AwaitAccepted(Of("ca", from), Of("client", to));
    server_files_.Put(Of("server", to), both);
    client_files_.Put(Of("client", to), both);
    AwaitConnections();
    AwaitAccepted(Of("ca", to), Of("client", from));
    client_files_.Put(Of("client", to), {Of("ca", to)});
    server_files_.Put(Of("server", to), {Of("ca", to)});
    AwaitAccepted(Of("ca", to), Of("client", from), false);
  }

  Certificates files_;
  Deployed server_files_;
  Deployed client_files_;
  std::unique_ptr<TestServer> server_;
  std::atomic<int> connections_ = 0;  // that were made while certificates are replaced
};

TEST_F(CertificateRotationTest, APairThatIsReplacedWhileItIsReadIsReadAgain) {
  files_.Make("client-0b", Of("ca", 0), "DNS:client");
  std::atomic<bool> over = false;
  std::thread replaces([&] {
    for (bool other = false; !over; other = !other) {
      client_files_.Put(other ? "client-0b" : Of("client", 0), {Of("ca", 0)});
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // as no five looks in a row can meet
    }
  });
  for (int i = 0; i < 200; ++i) {
    const auto client = Connect();
    EXPECT_TRUE(client.ok()) << client.status();
    if (!client.ok()) break;
  }
  over = true;
  replaces.join();
}

// The client has read its files when its first connection comes, and they are replaced before that goes on.
TEST_F(CertificateRotationTest, AuthoritiesThatAreReplacedBeforeTheFirstHandshakeAreReadAgain) {
  MakeGeneration(1);
  client_files_.Put(Of("client", 0), {Of("ca", 1)});
  const testing::FaultProxy proxy(server_->target(), [&](int connection) {
    if (connection == 0) client_files_.Put(Of("client", 0), {Of("ca", 0)});
    return std::vector<testing::Fault>();
  });
  const auto client = Connect(proxy.target());
  EXPECT_TRUE(client.ok()) << client.status();
}

TEST_F(CertificateRotationTest, AuthoritiesThatStayAsTheyWereReadAreRefusedAtOnce) {
  MakeGeneration(1);
  client_files_.Put(Of("client", 0), {Of("ca", 1)});
  const testing::FaultProxy proxy(server_->target(), [&](int connection) {
    // Another folder with the same files in it.
    if (connection == 0) client_files_.Put(Of("client", 0), {Of("ca", 1)});
    return std::vector<testing::Fault>();
  });
  const auto client = Connect(proxy.target());
  EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
  EXPECT_THAT(std::string(client.status().message()),
              AllOf(HasSubstr("not signed by"), HasSubstr("--tls_ca"), Not(HasSubstr("gave up"))));
}

TEST_F(CertificateRotationTest, NoCallFailsWhileCertificatesAndAuthoritiesAreReplaced) {
  const auto client = Connect();
  ASSERT_TRUE(client.ok()) << client.status();
  auto head = (*client)->CreateHead(
      {.name = "head", .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32});
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_TRUE(head->WriteWeights(DataType::kFloat32, RandomFloats(kVocab * kHidden, 1).data()).ok());

  std::atomic<bool> over = false;
  std::atomic<int64_t> batches = 0;
  std::atomic<int64_t> reconnects = 0;
  std::vector<SessionMarks> marks(kSessions);
  std::vector<std::thread> threads;
  for (int i = 0; i < kSessions; ++i) {
    threads.emplace_back([&, i] {
      auto session = head->OpenSession({.rank = i, .chunk_bytes = 4096, .lanes = 2});
      ASSERT_TRUE(session.ok()) << session.status();
      const std::vector<int64_t> labels = RandomLabels(kTokens, kVocab, 5);
      const std::vector<float> hidden = RandomFloats(kTokens * kHidden, 6);
      std::vector<float> losses(kTokens);
      while (!over) {
        const auto result =
            session->Compute({.labels = labels, .hidden_states = hidden.data()}, {.losses = losses});
        ASSERT_TRUE(result.ok()) << result.status();
        ++batches;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // leaves the machine to the others
      }
      reconnects += session->reconnects();
      marks[static_cast<size_t>(i)] = session->marks();
    });
  }
  threads.emplace_back([&] {
    while (!over) {
      const auto fresh = Connect();
      ASSERT_TRUE(fresh.ok()) << fresh.status();
      ASSERT_TRUE((*fresh)->Status().ok());
      ++connections_;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  for (int i = 0; i < kRotations && !HasFailure(); ++i) Rotate(i);
  over = true;
  for (std::thread& thread : threads) thread.join();
  ASSERT_FALSE(HasFailure());

  EXPECT_GE(reconnects, kSessions) << "connections that are too old are made anew";
  EXPECT_GE(connections_, kRotations);
  std::vector<float> gradient(kVocab * kHidden);
  const auto flush = head->Flush({}, marks, gradient.data());
  ASSERT_TRUE(flush.ok()) << flush.status();
  EXPECT_EQ(flush->window_tokens, static_cast<uint64_t>(batches * kTokens)) << "each token once";
}

}  // namespace
}  // namespace lossd::certificate_rotation_test
