// What comes to the metrics port.
#include <algorithm>
#include <string>

#include "server/telemetry/http/http_request.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

using telemetry::HttpRequest;
using telemetry::ParseRequest;

bool IsVisible(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

void CheckRequest(const HttpRequest& request) {
  Expect(!request.method.empty() && IsVisible(request.method), "there is a method");
  Expect(IsVisible(request.path), "a path is visible");
  Expect(request.path.find_first_of("?#") == std::string::npos, "the arguments are cut off");
  const std::string host = request.host.value_or("");
  Expect(host.find("\r\n") == std::string::npos, "a host is in one line");
  if (request.path.empty()) return;  // of arguments alone

  std::string written = request.method + " " + request.path + " HTTP/1.0\r\n";
  if (request.host.has_value()) written += "Host: " + host + "\r\n";
  const auto again = ParseRequest(written + "\r\n");
  Expect(again.has_value(), "what is written is accepted");
  Expect(again->method == request.method && again->path == request.path && again->host == request.host,
         "what is written is read again");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using lossd::fuzz::Expect;
  const std::string_view bytes = lossd::fuzz::TextOf(data, size);
  const size_t end = lossd::telemetry::EndOfHead(bytes);
  if (end == std::string_view::npos) {
    (void)lossd::telemetry::ParseRequest(bytes);  // whoever calls it, it reads nothing else
    return 0;
  }
  const std::string_view head = bytes.substr(0, end);
  Expect(end <= size && head.ends_with("\r\n\r\n"), "a head ends in an empty line");
  Expect(lossd::telemetry::EndOfHead(head) == end &&
             lossd::telemetry::EndOfHead(head.substr(0, end - 1)) == std::string_view::npos,
         "a head ends there whatever the pieces are in which it comes");
  const auto request = lossd::telemetry::ParseRequest(head);
  if (request.has_value()) lossd::fuzz::CheckRequest(*request);
  return 0;
}
