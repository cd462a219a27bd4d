#include "tests/integration/tls/certificates.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>

namespace lossd::testing {
namespace {

// EC keys: they take no time to make.
constexpr char kNewKey[] = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";

void OpenSsl(const std::string& arguments) {
  const std::string command = "openssl " + arguments + " 2>/dev/null";
  if (std::system(command.c_str()) == 0) return;  // NOLINT(cert-env33-c): a test, with arguments of its own
  std::cerr << "certificates: failed: " << command << "\n";
  std::abort();
}

}  // namespace

Certificates::Certificates() : folder_(std::filesystem::temp_directory_path() / "lossd-tls-XXXXXX") {
  if (mkdtemp(folder_.data()) == nullptr) std::abort();
}

Certificates::~Certificates() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void Certificates::MakeAuthority(const std::string& name) const {
  OpenSsl("req -x509 " + std::string(kNewKey) + " -days 30 -subj /CN=" + name + " -keyout " + Key(name) +
          " -out " + Certificate(name));
}

void Certificates::Make(const std::string& name, const std::string& authority,
                        const std::string& names) const {
  const std::string request = Path(name + ".csr");
  const std::string extension = Path(name + ".ext");
  std::ofstream(extension) << "subjectAltName=" << names << "\n";
  OpenSsl("req " + std::string(kNewKey) + " -subj /CN=" + name + " -keyout " + Key(name) + " -out " +
          request);
  OpenSsl("x509 -req -days 30 -CAcreateserial -in " + request + " -CA " + Certificate(authority) +
          " -CAkey " + Key(authority) + " -extfile " + extension + " -out " + Certificate(name));
}

void Certificates::Replace(const std::string& to, const std::string& from) const {
  for (const char* kind : {".pem", ".key"}) {
    std::filesystem::copy_file(Path(from + kind), Path("replacement"));
    std::filesystem::rename(Path("replacement"), Path(to + kind));
  }
}

}  // namespace lossd::testing
