// The head of an HTTP request, as far as pages need it.
#ifndef LOSSD_SERVER_TELEMETRY_HTTP_HTTP_REQUEST_H_
#define LOSSD_SERVER_TELEMETRY_HTTP_HTTP_REQUEST_H_

#include <optional>
#include <string>
#include <string_view>

namespace lossd::telemetry {

struct HttpRequest {
  std::string method;
  std::string path;                 // of the target, without arguments; not decoded
  std::optional<std::string> host;  // nothing: a client of HTTP/1.0 that sends none
};

// Where the head of a request that begins `bytes` ends, its empty line included; npos: there is more to come.
size_t EndOfHead(std::string_view bytes);

// `head` as EndOfHead found it; whatever is in it. Nothing if it is no request of HTTP/1.0 or 1.1 (RFC 9112):
// lines that are none, a name of a header with what no name has, more than one Host, none in HTTP/1.1.
std::optional<HttpRequest> ParseRequest(std::string_view head);

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_HTTP_HTTP_REQUEST_H_
