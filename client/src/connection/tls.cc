#include "client/src/connection/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/sha.h>
#include <openssl/x509.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace lossd::internal {
namespace {

namespace tls = grpc::experimental;

constexpr unsigned int kLookAgainSeconds = 1;

// At a pair that does not match: it may be just being replaced.
constexpr int kMostLooks = 5;
constexpr std::chrono::milliseconds kBetweenLooks(50);

// As far as it can be read. An iterator over the buffer would throw where the file is a directory.
std::string ContentOf(const std::string& path) {
  std::ostringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(content).str();
}

std::string DigestOf(const std::string& path) {
  if (path.empty()) return {};
  const std::string content = ContentOf(path);
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(content.data()), content.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

absl::Status CheckPem(const char* field, const std::string& path, const char* kind) {
  const std::string text = ContentOf(path);
  if (text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("tls.", field, ": cannot read '", path,
                                                   "'; it must be a PEM file that this user may read"));
  }
  if (absl::StrContains(text, "-----BEGIN ") && absl::StrContains(text, absl::StrCat(kind, "-----"))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("tls.", field, ": '", path, "' holds no ", kind, "; it must be a PEM file with one"));
}

template <typename T>
T* Read(const std::string& path, T* (*read)(BIO*, T**, pem_password_cb*, void*)) {
  BIO* const file = BIO_new_file(path.c_str(), "r");
  if (file == nullptr) return nullptr;
  T* const result = read(
      file, nullptr, [](char*, int, int, void*) { return -1; }, nullptr);
  BIO_free(file);
  return result;
}

bool IsPair(const TlsOptions& options) {
  X509* const certificate = Read(options.certificate, PEM_read_bio_X509);
  EVP_PKEY* const key = Read(options.key, PEM_read_bio_PrivateKey);
  const bool match =
      certificate != nullptr && key != nullptr && X509_check_private_key(certificate, key) == 1;
  EVP_PKEY_free(key);
  X509_free(certificate);
  ERR_clear_error();
  return match;
}

// gRPC would try for ever, without a word. Between the two files both may have been replaced.
absl::Status CheckPair(const TlsOptions& options) {
  for (int looks = 1; !IsPair(options); ++looks) {
    if (looks < kMostLooks) {
      std::this_thread::sleep_for(kBetweenLooks);
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "tls.key: '", options.key, "' is not the key, without a passphrase, of the first certificate in '",
        options.certificate, "'"));
  }
  return absl::OkStatus();
}

absl::Status Check(const TlsOptions& options) {
  if (options.certificate.empty() != options.key.empty()) {
    return absl::InvalidArgumentError(
        "tls.certificate and tls.key go together: give both for a server that wants to see a certificate, or "
        "neither");
  }
  if (!options.ca_certificates.empty()) {
    if (absl::Status status = CheckPem("ca_certificates", options.ca_certificates, "CERTIFICATE");
        !status.ok()) {
      return status;
    }
  }
  if (options.certificate.empty()) return absl::OkStatus();
  if (absl::Status status = CheckPem("certificate", options.certificate, "CERTIFICATE"); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckPem("key", options.key, "PRIVATE KEY"); !status.ok()) return status;
  return CheckPair(options);
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const ClientOptions& options) {
  if (!options.tls.has_value()) return grpc::InsecureChannelCredentials();
  const TlsOptions& files = *options.tls;
  if (absl::Status status = Check(files); !status.ok()) return status;
  tls::TlsChannelCredentialsOptions credentials;
  if (!files.ca_certificates.empty() || !files.certificate.empty()) {
    credentials.set_certificate_provider(std::make_shared<tls::FileWatcherCertificateProvider>(
        files.key, files.certificate, files.ca_certificates, kLookAgainSeconds));
  }
  if (!files.ca_certificates.empty()) credentials.watch_root_certs();
  if (!files.certificate.empty()) credentials.watch_identity_key_cert_pairs();
  return tls::TlsCredentials(credentials);
}

TlsDigests DigestsOf(const ClientOptions& options) {
  if (!options.tls.has_value()) return {};
  return {DigestOf(options.tls->ca_certificates), DigestOf(options.tls->certificate),
          DigestOf(options.tls->key)};
}

}  // namespace lossd::internal
