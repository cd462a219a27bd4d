#include "server/telemetry/http/http_request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace lossd::telemetry {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr std::string_view kHeadEnd = "\r\n\r\n";
constexpr std::string_view kScheme = "http://";
constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";  // of tokens, beside letters and digits

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

// RFC 9110: what names of methods and headers are made of.
bool IsToken(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || kMarks.find(c) != std::string_view::npos;
  });
}

bool IsVisible(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isgraph(static_cast<unsigned char>(c));
  });
}

// Takes the text before `end`, and `end` with it; all of the text if there is no such end.
std::string_view Take(std::string_view* text, std::string_view end) {
  const size_t at = std::min(text->find(end), text->size());
  const std::string_view taken = text->substr(0, at);
  text->remove_prefix(std::min(at + end.size(), text->size()));
  return taken;
}

// A target that is a whole URL, as proxies are sent, names the host itself.
bool ReadTarget(std::string_view target, HttpRequest* request) {
  if (!IsVisible(target)) return false;
  if (absl::StartsWithIgnoreCase(View(target.substr(0, kScheme.size())), View(kScheme))) {
    target.remove_prefix(kScheme.size());
    const size_t slash = std::min(target.find('/'), target.size());
    request->host = std::string(target.substr(0, slash));
    target.remove_prefix(slash);
    if (target.empty()) target = "/";
  }
  request->path = std::string(target.substr(0, target.find_first_of("?#")));
  return true;
}

}  // namespace

size_t EndOfHead(std::string_view bytes) {
  const size_t end = bytes.find(kHeadEnd);
  return end == std::string_view::npos ? end : end + kHeadEnd.size();
}

std::optional<HttpRequest> ParseRequest(std::string_view head) {
  HttpRequest request;
  std::string_view line = Take(&head, kLineEnd);
  const std::string_view method = Take(&line, " ");
  const std::string_view target = Take(&line, " ");
  if (!IsToken(method) || !ReadTarget(target, &request)) return std::nullopt;
  if (line != "HTTP/1.1" && line != "HTTP/1.0") return std::nullopt;
  request.method = std::string(method);
  std::optional<std::string> host;
  for (std::string_view header = Take(&head, kLineEnd); !header.empty(); header = Take(&head, kLineEnd)) {
    if (header.find(':') == std::string_view::npos) return std::nullopt;
    const std::string_view name = Take(&header, ":");
    if (!IsToken(name)) return std::nullopt;
    if (!absl::EqualsIgnoreCase(View(name), "host")) continue;
    if (host.has_value()) return std::nullopt;
    host = std::string(absl::StripAsciiWhitespace(View(header)));
  }
  if (!host.has_value() && line == "HTTP/1.1") return std::nullopt;
  if (!request.host.has_value()) request.host = std::move(host);
  return request;
}

}  // namespace lossd::telemetry
