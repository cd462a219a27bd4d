#include "client/src/connection/channel_arguments.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "proto/wire/token.h"

namespace lossd::internal {
namespace {

// A name may come to another address while its server is away: gRPC's own 30 s are longer than most patience.
constexpr int kBetweenLookUpsMs = 1000;

constexpr const char* kProxyVariables[] = {"grpc_proxy", "https_proxy", "http_proxy"};
constexpr const char* kExceptions[] = {"no_grpc_proxy", "no_proxy"};

// The first variable that is set, even to nothing; null: none is.
template <size_t kCount>
const char* FirstSet(const char* const (&names)[kCount]) {
  const auto* const found =
      std::find_if(std::begin(names), std::end(names), [](const char* name) { return std::getenv(name); });
  return found == std::end(names) ? nullptr : *found;
}

// gRPC takes http://[USER:PASSWORD@]HOST[:PORT] alone.
bool IsUsable(absl::string_view proxy) {
  return absl::ConsumePrefix(&proxy, "http://") && !proxy.empty() && proxy.front() != '/';
}

// The hosts of a target, which is one of several with gRPC's own schemes; IPv6 addresses in their brackets.
std::vector<std::string> HostsOf(absl::string_view target) {
  for (const char* scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::ConsumePrefix(&target, scheme)) break;
  }
  std::vector<std::string> hosts =
      absl::StrSplit(absl::StrReplaceAll(target, {{"%5B", "["}, {"%5D", "]"}}), ',');
  for (std::string& host : hosts) {
    if (!absl::EndsWith(host, "]")) host = host.substr(0, host.rfind(':'));
  }
  return hosts;
}

absl::string_view WithoutBrackets(absl::string_view host) {
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  return host;
}

bool IsExcepted(const std::string& target) {
  const char* const variable = FirstSet(kExceptions);
  if (variable == nullptr) return false;
  const std::vector<std::string> ends = absl::StrSplit(std::getenv(variable), ',', absl::SkipWhitespace());
  const std::vector<std::string> hosts = HostsOf(target);
  return std::all_of(hosts.begin(), hosts.end(), [&ends](const std::string& host) {
    return std::any_of(ends.begin(), ends.end(), [&host](const std::string& end) {
      return absl::EndsWithIgnoreCase(WithoutBrackets(host), absl::StripAsciiWhitespace(end));
    });
  });
}

}  // namespace

bool IsLoopback(const std::string& target) {
  if (absl::StartsWith(target, "unix:") || absl::StartsWith(target, "unix-abstract:")) return true;
  const std::vector<std::string> hosts = HostsOf(target);
  return std::all_of(hosts.begin(), hosts.end(), wire::IsLoopbackHost);
}

Proxy ProxyTo(const std::string& target, const ClientOptions& options) {
  const char* const variable = FirstSet(kProxyVariables);
  if (variable == nullptr || *std::getenv(variable) == '\0') return {};
  const bool has_plain_token = !options.token_file.empty() && !options.tls.has_value();
  if (has_plain_token || IsLoopback(target) || IsExcepted(target)) return {};
  return {.variable = variable, .is_used = IsUsable(std::getenv(variable))};
}

grpc::ChannelArguments ArgumentsFor(const std::string& target, const ClientOptions& options,
                                    const std::string& host) {
  grpc::ChannelArguments arguments;
  if (options.tls.has_value()) {
    const std::string& name = options.tls->server_name.empty() ? host : options.tls->server_name;
    if (!name.empty()) arguments.SetSslTargetNameOverride(name);
  }
  if (!ProxyTo(target, options).is_used) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kBetweenLookUpsMs);
  return arguments;
}

std::string ProxyAdvice(const std::string& target, const ClientOptions& options) {
  const Proxy proxy = ProxyTo(target, options);
  if (proxy.variable.empty()) return "";
  if (!proxy.is_used) {
    return absl::StrCat("the proxy that ", proxy.variable,
                        " names is not used: its value does not have the form http://HOST:PORT");
  }
  return absl::StrCat("connections to ", target, " go by the proxy that ", proxy.variable,
                      " names: to connect without it, add the host to no_proxy or unset ", proxy.variable);
}

}  // namespace lossd::internal
