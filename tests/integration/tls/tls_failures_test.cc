// Connections that cannot come about say why, and what to do about it, and do so at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lossd/client.h"
#include "server/rpc/transport/tls.h"
#include "tests/integration/tls/certificates.h"
#include "tests/support/test_server.h"

namespace lossd::tls_failures_test {
namespace {

using ::testing::AllOf;
using testing::Certificates;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TestServer;

class TlsFailuresTest : public ::testing::Test {
 protected:
  TlsFailuresTest() {
    files_.MakeAuthority("ca");
    files_.MakeAuthority("other_ca");
    files_.Make("server", "ca", "DNS:localhost,IP:127.0.0.1");
    files_.Make("stranger", "other_ca", "DNS:stranger");
  }

  rpc::TlsFiles ServerFiles(const std::string& client_ca = "") const {
    return {.certificate = files_.Certificate("server"), .key = files_.Key("server"), .client_ca = client_ca};
  }

  static std::unique_ptr<TestServer> Serve(const rpc::TlsFiles& tls) {
    testing::TestServerOptions options;
    options.server.tls = tls;
    return std::make_unique<TestServer>(options);
  }

  // A failure that waiting cannot mend must not wait for the end of the reconnect timeout, which would end
  // the message with "gave up".
  static std::string Failure(const TestServer& server, const std::optional<TlsOptions>& tls) {
    ClientOptions options{.reconnect_timeout = std::chrono::minutes(10)};
    options.tls = tls;
    const auto client = Client::Connect(server.target(), options);
    EXPECT_TRUE(absl::IsUnavailable(client.status())) << client.status();
    EXPECT_THAT(std::string(client.status().message()), Not(HasSubstr("gave up")));
    return std::string(client.status().message());
  }

  absl::Status Refusal(const rpc::TlsFiles& files) const {
    TestServer host;  // for its engine
    return rpc::Server::Start({.listen = "127.0.0.1:0", .tls = files}, &host.engine()).status();
  }

  Certificates files_;
};

TEST_F(TlsFailuresTest, APlainClientIsToldThatTheServerMayWantTls) {
  const auto server = Serve(ServerFiles());
  EXPECT_THAT(Failure(*server, std::nullopt), AllOf(HasSubstr("wants TLS"), HasSubstr("--tls_ca")));
}

TEST_F(TlsFailuresTest, ATlsClientIsToldThatTheServerSpeaksNone) {
  const auto server = Serve({});
  EXPECT_THAT(Failure(*server, TlsOptions{.ca_certificates = files_.Certificate("ca")}),
              AllOf(HasSubstr("does not speak TLS"), HasSubstr("--tls_certificate")));
}

TEST_F(TlsFailuresTest, AnUnknownAuthorityIsNamed) {
  const auto server = Serve(ServerFiles());
  EXPECT_THAT(Failure(*server, TlsOptions{.ca_certificates = files_.Certificate("other_ca")}),
              AllOf(HasSubstr("not signed by"), HasSubstr("other_ca.pem"), HasSubstr("--tls_ca")));
}

TEST_F(TlsFailuresTest, TheSystemsAuthoritiesDoNotKnowAPrivateOne) {
  const auto server = Serve(ServerFiles());
  EXPECT_THAT(Failure(*server, TlsOptions{}), HasSubstr("not signed by the system's authorities"));
}

TEST_F(TlsFailuresTest, AWrongHostNameIsNamed) {
  const auto server = Serve(ServerFiles());
  EXPECT_THAT(
      Failure(*server, TlsOptions{.ca_certificates = files_.Certificate("ca"), .server_name = "elsewhere"}),
      AllOf(HasSubstr("not for the name 'elsewhere'"), HasSubstr("--tls_server_name")));
}

TEST_F(TlsFailuresTest, AMissingClientCertificateIsNamed) {
  const auto server = Serve(ServerFiles(files_.Certificate("ca")));
  EXPECT_THAT(Failure(*server, TlsOptions{.ca_certificates = files_.Certificate("ca")}),
              AllOf(HasSubstr("client certificate"), HasSubstr("--tls_certificate")));
}

TEST_F(TlsFailuresTest, AClientCertificateOfAnotherAuthorityIsNamed) {
  const auto server = Serve(ServerFiles(files_.Certificate("ca")));
  EXPECT_THAT(Failure(*server, TlsOptions{.ca_certificates = files_.Certificate("ca"),
                                          .certificate = files_.Certificate("stranger"),
                                          .key = files_.Key("stranger")}),
              AllOf(HasSubstr("stranger.pem"), HasSubstr("--tls_client_ca")));
}

TEST_F(TlsFailuresTest, FilesOfTheClientThatCannotWorkAreRefusedBeforeAnythingIsSent) {
  const auto refused = [&](const TlsOptions& tls) {
    ClientOptions options;
    options.tls = tls;
    const auto status = Client::Connect("127.0.0.1:1", options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused({.ca_certificates = files_.Path("nowhere")}), HasSubstr("cannot read"));
  EXPECT_THAT(refused({.ca_certificates = files_.Path("")}), HasSubstr("cannot read")) << "a directory";
  EXPECT_THAT(refused({.ca_certificates = files_.Key("ca")}), HasSubstr("holds no CERTIFICATE"));
  EXPECT_THAT(refused({.certificate = files_.Certificate("server")}), HasSubstr("go together"));
  EXPECT_THAT(refused({.certificate = files_.Certificate("server"), .key = files_.Certificate("server")}),
              HasSubstr("holds no PRIVATE KEY"));
  EXPECT_THAT(refused({.certificate = files_.Certificate("server"), .key = files_.Key("stranger")}),
              AllOf(HasSubstr("stranger.key"), HasSubstr("is not the key")));
}

TEST_F(TlsFailuresTest, AServerDoesNotStartWithFilesThatCannotWork) {
  const auto refused = [&](const rpc::TlsFiles& files) {
    const absl::Status status = Refusal(files);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  const std::string certificate = files_.Certificate("server");
  const std::string key = files_.Key("server");
  EXPECT_THAT(refused({.certificate = certificate, .key = files_.Path("nowhere"), .client_ca = {}}),
              AllOf(HasSubstr("--tls_key"), HasSubstr("nowhere: No such file")));
  EXPECT_THAT(refused({.certificate = certificate, .key = files_.Key("ca"), .client_ca = {}}),
              HasSubstr("is not the key of the certificate"));
  EXPECT_THAT(refused({.certificate = key, .key = key, .client_ca = {}}), HasSubstr("holds no certificate"));
  EXPECT_THAT(refused({.certificate = certificate, .key = {}, .client_ca = {}}), HasSubstr("TLS needs both"));
  EXPECT_THAT(refused({.certificate = {}, .key = {}, .client_ca = certificate}),
              HasSubstr("needs --tls_certificate"));
  EXPECT_THAT(refused({.certificate = certificate, .key = key, .client_ca = key}),
              HasSubstr("--tls_client_ca"));
}

}  // namespace
}  // namespace lossd::tls_failures_test
