// Where the connections of a channel go, and by which proxy of the environment.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_CHANNEL_ARGUMENTS_H_
#define LOSSD_CLIENT_SRC_CONNECTION_CHANNEL_ARGUMENTS_H_

#include <string>

#include "grpcpp/support/channel_arguments.h"
#include "lossd/client.h"

namespace lossd::internal {

// What every channel to `target` needs. `host`: the name in the certificate there, where TlsOptions has none;
// empty: the host of the target.
grpc::ChannelArguments ArgumentsFor(const std::string& target, const ClientOptions& options,
                                    const std::string& host = {});

// The proxy that the environment names for connections to a target.
struct Proxy {
  std::string variable = {};  // that names it; empty: none does
  bool is_used = false;       // gRPC can use its value
};
// Loopback and tokens in plain text never go by a proxy. Otherwise the rules are gRPC's: the first of
// grpc_proxy, https_proxy and http_proxy that is set counts, unless the host ends like an entry of
// no_grpc_proxy, or of no_proxy where that is not set.
Proxy ProxyTo(const std::string& target, const ClientOptions& options);

// Says which variable matters where a connection to `target` fails, and what to do. The variable's value may
// hold a password and is left out. Empty: no variable matters.
std::string ProxyAdvice(const std::string& target, const ClientOptions& options);

// Whether connections to `target` stay on this machine.
bool IsLoopback(const std::string& target);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_CHANNEL_ARGUMENTS_H_
