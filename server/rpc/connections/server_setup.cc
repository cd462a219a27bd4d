#include "server/rpc/connections/server_setup.h"

#include <grpc/grpc.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/transport/listen_address.h"
#include "server/rpc/transport/tls.h"

namespace lossd::rpc {
namespace {

// Messages of weights are this large at most (clients send 4 MiB), whatever is said of chunks.
constexpr int64_t kMaxWeightsMessage = int64_t{8} << 20;

// Calls of one connection at a time; the client's gRPC lets further ones wait.
constexpr int kMostStreams = 256;

// A chunk a little over its limits still arrives, so that it gets an answer that says so; far above, gRPC
// resets the call.
int64_t MaxMessageBytes(const engine::ChunkLimits& limits) {
  const int64_t bytes = 2 * limits.max_chunk_bytes + 16 * limits.max_chunk_tokens + (64 << 10);
  return std::clamp<int64_t>(bytes, kMaxWeightsMessage, std::numeric_limits<int>::max());
}

// gRPC's numbers of milliseconds: the largest stands for ever.
int Milliseconds(absl::Duration duration) {
  return static_cast<int>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, std::numeric_limits<int>::max()));
}

void LimitConnections(grpc::ServerBuilder& builder, const ConnectionLimits& limits) {
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(limits.max_metadata_bytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostStreams);
  if (limits.max_age == absl::InfiniteDuration()) return;
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, Milliseconds(limits.max_age));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, Milliseconds(limits.max_age_grace));
}

// Reads into buffers of 64 KiB, as many as it takes, in the place of one of 4 MiB at most.
constexpr char kManyBuffers[] = "tcp_read_chunks";

}  // namespace

void BoundReadBuffers() {
  const char* const set = getenv("GRPC_EXPERIMENTS");
  const std::string experiments = set == nullptr ? "" : set;
  if (absl::StrContains(experiments, kManyBuffers)) return;  // somebody has chosen
  const char* const comma = experiments.empty() ? "" : ",";
  setenv("GRPC_EXPERIMENTS", absl::StrCat(experiments, comma, "-", kManyBuffers).c_str(), 1);
}

void LimitServer(const engine::ChunkLimits& chunks, int64_t staging_bytes,
                 const ConnectionLimits& connections, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(MaxMessageBytes(chunks)));
  builder.SetMaxSendMessageSize(std::numeric_limits<int>::max());
  // Clients that vanish without a word are noticed and their queued work withdrawn.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  // A backstop behind the credits, far enough above them that well-behaved clients never meet it.
  grpc::ResourceQuota quota("lossd");
  quota.Resize(static_cast<size_t>(2 * staging_bytes + (int64_t{1} << 30)));
  builder.SetResourceQuota(quota);
  LimitConnections(builder, connections);
}

ServerCredentials::ServerCredentials(const TlsFiles& tls, const std::shared_ptr<AccessControl>& access) {
  if (access == nullptr) {
    host_ = socket_ = grpc::InsecureServerCredentials();
  } else {
    host_ = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
    socket_ = grpc::experimental::LocalServerCredentials(UDS);
  }
  if (tls.enabled()) host_ = MakeServerCredentials(tls);
  if (access == nullptr) return;
  host_->SetAuthMetadataProcessor(access);
  socket_->SetAuthMetadataProcessor(access);
}

const std::shared_ptr<grpc::ServerCredentials>& ServerCredentials::For(const std::string& address) const {
  return IsUnixSocket(address) ? socket_ : host_;
}

}  // namespace lossd::rpc
