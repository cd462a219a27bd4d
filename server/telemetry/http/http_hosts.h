// The names that the metrics port may be asked by.
//
// A web page can give its own name another address while it is shown (DNS rebinding): the visitor's browser
// then takes the answers of a server on the visitor's machine or network for the page's own. It sends the
// page's name as Host, though, which is none of these.
#ifndef LOSSD_SERVER_TELEMETRY_HTTP_HTTP_HOSTS_H_
#define LOSSD_SERVER_TELEMETRY_HTTP_HTTP_HOSTS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd::telemetry {

class HttpHosts {
 public:
  // The names that need no flag.
  HttpHosts() = default;
  // And `listen_host`, of the address that is listened on, and those of `more`, with commas: names, "*.NAME"
  // for all that end in .NAME, or "*" for any. INVALID_ARGUMENT naming what is none of these.
  static absl::StatusOr<HttpHosts> Parse(const std::string& listen_host, const std::string& more);

  // `host` as in a request: NAME, NAME:PORT, [ADDRESS]:PORT. True of every address; of names that nobody can
  // have in the public DNS: those without a dot (localhost, the name of a machine or of a service), those in
  // localhost, internal, svc and cluster.local; of the machine's own name; and of those that were given.
  bool Include(std::string_view host) const;

 private:
  bool any_ = false;
  std::vector<std::string> names_;    // in small letters
  std::vector<std::string> endings_;  // the same, with their dot
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_HTTP_HTTP_HOSTS_H_
