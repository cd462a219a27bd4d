// By what the ranks of a group know that they belong together.
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_CREDENTIALS_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"

namespace lossd::rpc {

// A token, certificates, or both. Nothing of it is ever logged.
struct GroupCredentials {
  // The same at every rank. It goes to the leader as the first thing of a call, as it is: who can read the
  // network learns it, unless there is TLS. Empty: there is none.
  std::string token = {};

  // Contents of PEM files, all three or none: without them the stream is plain text. Both ends show a
  // certificate of `ca`, an authority of the group's own: whoever has one from it belongs to the group, at
  // whatever address.
  std::string certificate = {};  // with intermediate ones behind it
  std::string key = {};
  std::string ca = {};

  bool tls() const { return !certificate.empty(); }
};

// INVALID_ARGUMENT, saying which of the three and what to do, if they cannot work.
absl::Status CheckCredentials(const GroupCredentials& credentials);

// For credentials that are checked.
std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const GroupCredentials& credentials);
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const GroupCredentials& credentials);

// Shows the token in a call that is about to start.
void ShowToken(const GroupCredentials& credentials, grpc::ClientContext* context);
// Whether a call shows it. Takes as long wherever the first difference is.
bool ShowsToken(const GroupCredentials& credentials, const grpc::ServerContextBase& context);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_CREDENTIALS_H_
