// Certificates for tests, made by the openssl program in a folder of their own, which goes with the object.
#ifndef LOSSD_TESTS_INTEGRATION_TLS_CERTIFICATES_H_
#define LOSSD_TESTS_INTEGRATION_TLS_CERTIFICATES_H_

#include <string>

namespace lossd::testing {

// Aborts the test process if openssl cannot be run.
class Certificates {
 public:
  Certificates();
  ~Certificates();
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  // "NAME.pem" and "NAME.key": an authority.
  void MakeAuthority(const std::string& name) const;
  // The same for `names`, as in "DNS:localhost,IP:127.0.0.1", signed by `authority`.
  void Make(const std::string& name, const std::string& authority, const std::string& names) const;
  // `to`.pem and `to`.key become those of `from`, each in one step.
  void Replace(const std::string& to, const std::string& from) const;

  std::string Path(const std::string& file) const { return folder_ + "/" + file; }
  std::string Certificate(const std::string& name) const { return Path(name + ".pem"); }
  std::string Key(const std::string& name) const { return Path(name + ".key"); }

 private:
  std::string folder_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_TLS_CERTIFICATES_H_
