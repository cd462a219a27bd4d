// Calls by method and code, and who was let in.
#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

constexpr Metric kRpcs{"lossd_rpcs_total", "Calls that ended.", kCounter, {"method", "code"}};
constexpr Metric kRpcSeconds{
    "lossd_rpc_seconds", "Time of calls; of streams the whole life.", kHistogram, {"method"}};
constexpr Metric kInFlight{"lossd_rpcs_in_flight", "Calls under way.", kGauge, {"method"}};
constexpr Metric kRefused{"lossd_connections_refused_total",
                          "Connections closed at once because too few file descriptors were left.", kCounter};
constexpr Metric kFlooding{
    "lossd_connections_flooding_total",
    "Connections ended because they opened calls faster than these can be cleared away.", kCounter};
constexpr Metric kDenied{
    "lossd_access_denied_total", "Calls refused by --tokens, by reason.", kCounter, {"reason"}};
constexpr Metric kTokenReloads{
    "lossd_token_reloads_total", "Changes of the file of --tokens.", kCounter, {"outcome"}};
constexpr Metric kTlsReloads{"lossd_tls_reloads_total", "Changes of the TLS files.", kCounter, {"outcome"}};
constexpr Metric kUnusable{"lossd_reload_failing",
                           "1 while files that have changed cannot be used and those from before go on.",
                           kGauge,
                           {"files"}};
constexpr Metric kTlsExpiry{"lossd_tls_certificate_expiry_timestamp_seconds",
                            "When the certificate ends, seconds since the epoch; 0: no TLS.", kGauge};

}  // namespace

void CollectCalls(const ServiceCounters& counters, Exposition& out) {
  out.Begin(kRpcs);
  for (const auto& method : counters.rpcs.methods()) {
    for (int code = 0; code < kStatusCodeCount; ++code) {
      out.Add({method->name, StatusCodeName(code)}, method->ended[static_cast<size_t>(code)]);
    }
  }
  out.Begin(kRpcSeconds);
  for (const auto& method : counters.rpcs.methods()) out.Add({method->name}, method->seconds);
  out.Begin(kInFlight);
  for (const auto& method : counters.rpcs.methods()) out.Add({method->name}, method->in_flight);
  out.Only(kRefused, counters.connections_refused);
  out.Only(kFlooding, counters.connections_flooding);
  const AccessCounters& access = counters.access;
  out.Begin(kDenied);
  out.Add({"no_token"}, access.no_token);
  out.Add({"unknown_token"}, access.unknown_token);
  out.Add({"role"}, access.role);
  out.Begin(kTokenReloads);
  out.Add({"ok"}, access.token_reloads);
  out.Add({"failed"}, access.token_reloads_failed);
  out.Begin(kTlsReloads);
  out.Add({"ok"}, access.tls_reloads);
  out.Add({"failed"}, access.tls_reloads_failed);
  out.Begin(kUnusable);
  out.Add({"tokens"}, access.tokens_unusable);
  out.Add({"tls"}, access.tls_unusable);
  out.Only(kTlsExpiry, access.tls_not_after_seconds);
}

}  // namespace lossd::telemetry
