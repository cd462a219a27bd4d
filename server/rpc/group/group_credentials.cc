#include "server/rpc/group/group_credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lossd::rpc {
namespace {

namespace tls = grpc::experimental;

constexpr char kTokenKey[] = "lossd-group-token-bin";

struct Closer {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Certificate = std::unique_ptr<X509, Closer>;
using Key = std::unique_ptr<EVP_PKEY, Closer>;

// Keys with a passphrase are not for servers that start by themselves.
int NoPassphrase(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*data*/) { return -1; }

std::unique_ptr<BIO, Closer> Bytes(const std::string& pem) {
  return std::unique_ptr<BIO, Closer>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// All that are in it.
std::vector<Certificate> ReadCertificates(const std::string& pem) {
  std::vector<Certificate> certificates;
  const std::unique_ptr<BIO, Closer> bytes = Bytes(pem);
  while (Certificate certificate{PEM_read_bio_X509(bytes.get(), nullptr, NoPassphrase, nullptr)}) {
    certificates.push_back(std::move(certificate));
  }
  ERR_clear_error();
  return certificates;
}

absl::Status Invalid(const char* which, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("--group_tls_", which, " ", why));
}

absl::Time EndOf(const X509& certificate) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(&certificate), &parts) != 1) return absl::InfiniteFuture();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

absl::Status CheckNotExpired(const char* which, absl::Time end) {
  if (end > absl::Now()) return absl::OkStatus();
  return Invalid(which,
                 absl::StrCat("expired at ", absl::FormatTime(end, absl::UTCTimeZone()), "; renew it"));
}

std::shared_ptr<tls::CertificateProviderInterface> ProviderOf(const GroupCredentials& credentials) {
  const std::vector<tls::IdentityKeyCertPair> own = {{credentials.key, credentials.certificate}};
  return std::make_shared<tls::StaticDataCertificateProvider>(credentials.ca, own);
}

}  // namespace

absl::Status CheckCredentials(const GroupCredentials& credentials) {
  if (!credentials.tls() && credentials.key.empty() && credentials.ca.empty()) return absl::OkStatus();
  if (!credentials.tls() || credentials.key.empty() || credentials.ca.empty()) {
    return Invalid("certificate",
                   "needs --group_tls_key and --group_tls_ca, and they need it: both ends of the group's "
                   "control show a certificate");
  }
  const std::vector<Certificate> certificates = ReadCertificates(credentials.certificate);
  const char* const kNone =
      "holds no certificate; it must be PEM, beginning with -----BEGIN CERTIFICATE-----";
  if (certificates.empty()) return Invalid("certificate", kNone);
  const X509& own = *certificates.front();
  const std::vector<Certificate> authorities = ReadCertificates(credentials.ca);
  if (authorities.empty()) return Invalid("ca", kNone);
  const Key key(PEM_read_bio_PrivateKey(Bytes(credentials.key).get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (key == nullptr) {
    return Invalid(
        "key",
        "holds no private key; it must be PEM, beginning with -----BEGIN PRIVATE KEY-----, without "
        "a passphrase");
  }
  const bool match = X509_check_private_key(&own, key.get()) == 1;
  ERR_clear_error();
  if (!match) {
    return Invalid(
        "key",
        "is not the key of --group_tls_certificate; give the key that the certificate was requested "
        "with, and this node's own certificate first in its file");
  }
  if (absl::Status status = CheckNotExpired("certificate", EndOf(own)); !status.ok()) return status;
  // A new authority stands beside the one that it replaces.
  absl::Time last = absl::InfinitePast();
  for (const Certificate& authority : authorities) last = std::max(last, EndOf(*authority));
  return CheckNotExpired("ca", last);
}

std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const GroupCredentials& credentials) {
  if (!credentials.tls()) return grpc::InsecureServerCredentials();
  tls::TlsServerCredentialsOptions options(ProviderOf(credentials));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return tls::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const GroupCredentials& credentials) {
  if (!credentials.tls()) return grpc::InsecureChannelCredentials();
  tls::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(ProviderOf(credentials));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  // The authority is checked; a name is not, since any node may lead, and pods have none that lasts.
  options.set_certificate_verifier(std::make_shared<tls::NoOpCertificateVerifier>());
  options.set_check_call_host(false);
  return tls::TlsCredentials(options);
}

void ShowToken(const GroupCredentials& credentials, grpc::ClientContext* context) {
  if (!credentials.token.empty()) context->AddMetadata(kTokenKey, credentials.token);
}

bool ShowsToken(const GroupCredentials& credentials, const grpc::ServerContextBase& context) {
  if (credentials.token.empty()) return true;
  const auto shown = context.client_metadata().find(kTokenKey);
  if (shown == context.client_metadata().end()) return false;
  const grpc::string_ref token = shown->second;
  return token.size() == credentials.token.size() &&
         CRYPTO_memcmp(token.data(), credentials.token.data(), token.size()) == 0;
}

}  // namespace lossd::rpc
