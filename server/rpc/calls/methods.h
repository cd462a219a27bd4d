// The methods of lossd's services, by the names that metrics, logs and roles use.
#ifndef LOSSD_SERVER_RPC_CALLS_METHODS_H_
#define LOSSD_SERVER_RPC_CALLS_METHODS_H_

#include <string>
#include <string_view>
#include <vector>

namespace lossd::rpc {

// "HeadService/CreateHead" and so on, of every service of the package lossd.v1.
std::vector<std::string> MethodNames();

// The method of a path as it is on the wire: "/lossd.v1.HeadService/CreateHead" is "HeadService/CreateHead".
// Those of gRPC's own services, "/grpc.NAME", lose the first slash; all others stay as they are, and are no
// method's name. What does not begin with a slash is no path: "".
std::string_view MethodOfPath(std::string_view path);

inline constexpr char kOpenSessionPath[] = "/lossd.v1.LossService/OpenSession";
inline constexpr char kCloseSessionPath[] = "/lossd.v1.LossService/CloseSession";

// Whether calls of this path are about heads and their windows: of several replicas one serves them.
bool IsPassedOn(std::string_view path);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_METHODS_H_
