#include "server/rpc/transport/tls.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/sha.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lossd::rpc {
namespace {

constexpr unsigned int kLookAgainSeconds = 1;
constexpr absl::Duration kExpiresSoon = absl::Hours(24 * 7);

struct Closer {
  void operator()(FILE* file) const { (void)std::fclose(file); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using File = std::unique_ptr<FILE, Closer>;
using Certificate = std::unique_ptr<X509, Closer>;
using Key = std::unique_ptr<EVP_PKEY, Closer>;

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

absl::StatusOr<File> Open(const char* flag, const std::string& path) {
  File file(std::fopen(path.c_str(), "re"));
  if (file != nullptr) return file;
  return Invalid(absl::StrCat("--", flag, ": cannot read ", path, ": ", std::strerror(errno),
                              "; it must be a PEM file that this user may read"));
}

// Keys with a passphrase are not for servers that start by themselves.
int NoPassphrase(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*data*/) { return -1; }

absl::StatusOr<Certificate> ReadCertificate(const char* flag, const std::string& path) {
  absl::StatusOr<File> file = Open(flag, path);
  if (!file.ok()) return file.status();
  Certificate certificate(PEM_read_X509(file->get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (certificate != nullptr) return certificate;
  return Invalid(
      absl::StrCat("--", flag, ": ", path,
                   " holds no certificate; it must be PEM, beginning with -----BEGIN CERTIFICATE-----"));
}

absl::StatusOr<Key> ReadKey(const std::string& path) {
  absl::StatusOr<File> file = Open("tls_key", path);
  if (!file.ok()) return file.status();
  Key key(PEM_read_PrivateKey(file->get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (key != nullptr) return key;
  return Invalid(
      absl::StrCat("--tls_key: ", path,
                   " holds no private key; it must be PEM, beginning with -----BEGIN PRIVATE KEY-----, "
                   "without a passphrase"));
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfiniteFuture();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

// Empty of no file, and of one that cannot be read.
std::string DigestOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (path.empty() || !file) return {};
  std::ostringstream stream;
  stream << file.rdbuf();  // an iterator over it would throw where the file has become a directory
  const std::string content = std::move(stream).str();
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(content.data()), content.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

absl::Status CheckFlags(const TlsFiles& files) {
  if (files.certificate.empty() != files.key.empty()) {
    const bool key_missing = files.key.empty();
    return Invalid(absl::StrCat("--", key_missing ? "tls_certificate" : "tls_key", " is given and --",
                                key_missing ? "tls_key" : "tls_certificate", " is not; TLS needs both"));
  }
  if (!files.client_ca.empty() && !files.enabled()) {
    return Invalid(
        "--tls_client_ca needs --tls_certificate and --tls_key: without TLS no client shows a certificate");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TlsCheck> ReadTls(const TlsFiles& files) {
  if (absl::Status status = CheckFlags(files); !status.ok()) return status;
  TlsCheck check{.not_after = absl::InfiniteFuture()};
  if (!files.enabled()) return check;
  const absl::StatusOr<Certificate> certificate = ReadCertificate("tls_certificate", files.certificate);
  if (!certificate.ok()) return certificate.status();
  const absl::StatusOr<Key> key = ReadKey(files.key);
  if (!key.ok()) return key.status();
  const bool match = X509_check_private_key(certificate->get(), key->get()) == 1;
  ERR_clear_error();
  if (!match) {
    return Invalid(
        absl::StrCat("--tls_key: ", files.key, " is not the key of the certificate in ", files.certificate,
                     "; give the key that the certificate was requested with, and the server's own "
                     "certificate first in its file"));
  }
  if (!files.client_ca.empty()) {
    const absl::StatusOr<Certificate> authority = ReadCertificate("tls_client_ca", files.client_ca);
    if (!authority.ok()) return authority.status();
  }
  check.digests = {DigestOf(files.certificate), DigestOf(files.key), DigestOf(files.client_ca)};
  check.not_after = TimeOf(X509_get0_notAfter(certificate->get()));
  if (check.not_after - absl::Now() < kExpiresSoon) {
    check.warnings.emplace_back("the TLS certificate expires within a week");
  }
  struct stat status {};
  if (stat(files.key.c_str(), &status) == 0 && (status.st_mode & S_IROTH) != 0) {
    check.warnings.emplace_back("the TLS key can be read by every user of this machine; chmod o-r it");
  }
  return check;
}

absl::StatusOr<TlsCheck> CheckTls(const TlsFiles& files) {
  absl::StatusOr<TlsCheck> check = ReadTls(files);
  if (!check.ok() || check->not_after > absl::Now()) return check;
  return Invalid(absl::StrCat("--tls_certificate: ", files.certificate, " expired at ",
                              absl::FormatTime(check->not_after, absl::UTCTimeZone()), "; renew it"));
}

std::vector<std::string> DifferencesOf(const TlsCheck& one, const TlsCheck& other) {
  constexpr std::array<const char*, 3> kNames = {"certificate", "key", "client_ca"};
  std::vector<std::string> differences;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (one.digests[i] != other.digests[i]) differences.emplace_back(kNames[i]);
  }
  return differences;
}

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsFiles& files) {
  namespace tls = grpc::experimental;
  tls::TlsServerCredentialsOptions options(std::make_shared<tls::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.client_ca, kLookAgainSeconds));
  options.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return tls::TlsServerCredentials(options);
}

void KeepOpenSslToTheEnd() { (void)OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr); }

TlsWatch::TlsWatch(TlsFiles files)
    : files_(std::move(files)), watch_({files_.certificate, files_.key, files_.client_ca}) {}

std::optional<absl::StatusOr<TlsCheck>> TlsWatch::Poll(Look look) {
  if (!files_.enabled()) return std::nullopt;
  return watch_.Reread(look, [this] { return CheckTls(files_); });
}

}  // namespace lossd::rpc
