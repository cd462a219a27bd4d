#include "server/telemetry/http/http_hosts.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace lossd::telemetry {
namespace {

constexpr size_t kLongestName = 253;  // of the DNS
// Reserved, or of a cluster's own DNS.
constexpr std::array<const char*, 4> kPrivateEndings = {".localhost", ".internal", ".svc", ".cluster.local"};

bool IsAddress(int family, const std::string& text) {
  in6_addr address{};  // has room for the other kind, too
  return inet_pton(family, text.c_str(), &address) == 1;
}

bool IsHostName(absl::string_view name) {
  return !name.empty() && name.size() <= kLongestName && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_';
  });
}

// Empty if it has none.
std::string MachineName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return {};
  return absl::AsciiStrToLower(name.data());
}

}  // namespace

absl::StatusOr<HttpHosts> HttpHosts::Parse(const std::string& listen_host, const std::string& more) {
  HttpHosts hosts;
  hosts.names_.push_back(absl::AsciiStrToLower(listen_host));
  for (const absl::string_view one : absl::StrSplit(more, ',', absl::SkipWhitespace())) {
    absl::string_view name = absl::StripAsciiWhitespace(one);
    if (name == "*") {
      hosts.any_ = true;
      continue;
    }
    const bool ending = absl::ConsumePrefix(&name, "*.");
    if (!IsHostName(name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", one, "' is neither a name (without a port) nor *.NAME nor *"));
    }
    const std::string lower = absl::AsciiStrToLower(name);
    if (ending) {
      hosts.endings_.push_back(absl::StrCat(".", lower));
    } else {
      hosts.names_.push_back(lower);
    }
  }
  return hosts;
}

bool HttpHosts::Include(std::string_view host) const {
  if (any_) return true;
  std::string name = absl::AsciiStrToLower(absl::string_view(host.data(), host.size()));
  if (absl::StartsWith(name, "[")) {
    const size_t end = name.find(']');
    return end != std::string::npos && IsAddress(AF_INET6, name.substr(1, end - 1));
  }
  name = name.substr(0, name.find(':'));
  if (absl::EndsWith(name, ".")) name.pop_back();
  if (!IsHostName(name)) return false;
  if (name.find('.') == std::string::npos || IsAddress(AF_INET, name)) return true;
  const auto ends = [&name](const auto& ending) { return absl::EndsWith(name, ending); };
  return std::any_of(kPrivateEndings.begin(), kPrivateEndings.end(), ends) ||
         std::any_of(endings_.begin(), endings_.end(), ends) ||
         std::find(names_.begin(), names_.end(), name) != names_.end() || name == MachineName();
}

}  // namespace lossd::telemetry
