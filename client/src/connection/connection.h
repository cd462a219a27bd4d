// What the client needs from a server: the calls of lossd.v1, with errors as absl::Status and the unary ones
// repeated while the server cannot be reached. Tests replace it; grpc_connection.h is the real one.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_CONNECTION_H_
#define LOSSD_CLIENT_SRC_CONNECTION_CONNECTION_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection/compute_stream.h"
#include "lossd/client.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/region.pb.h"
#include "lossd/v1/status.pb.h"
#include "proto/wire/tensor.h"

namespace lossd::internal {

// Some rows of a matrix, as they arrived.
struct RowPiece {
  int64_t first_row = 0;
  int64_t rows = 0;
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  uint64_t weight_version = 0;  // of weights; 0 of gradients
  wire::Tensor bytes;           // valid during the call of the sink
  std::string bias;             // fp32 [rows], or empty
};
// Takes the pieces one after the other; an error ends the call, which returns it.
using RowSink = std::function<absl::Status(const RowPiece&)>;
// Fills in the next message; false when there is none.
using WeightSource = std::function<bool(v1::WriteWeightsRequest*)>;

// What a call does about RESOURCE_EXHAUSTED with a time to try again at.
enum class WhenFull { kWait, kReturn };

// Thread-safe.
class Connection {
 public:
  virtual ~Connection() = default;
  virtual const ClientOptions& options() const = 0;
  virtual Traffic traffic() const = 0;

  // Whether the server can do all that `request` asks for: UNIMPLEMENTED names what it lacks. By what it said
  // in the last answer of GetStatus, without a call. Every call below looks by itself; Compute's messages are
  // its caller's.
  virtual absl::Status CheckSupported(const google::protobuf::Message& request) const = 0;

  // Unary calls. All are safe to repeat, and are repeated with growing pauses while the server is UNAVAILABLE
  // or asks for patience, up to options().reconnect_timeout. Each attempt has options().call_timeout.
  virtual absl::StatusOr<v1::Head> CreateHead(const v1::CreateHeadRequest& request) = 0;
  virtual absl::StatusOr<v1::DeleteHeadResponse> DeleteHead(const v1::DeleteHeadRequest& request) = 0;
  virtual absl::StatusOr<v1::ListHeadsResponse> ListHeads(const v1::ListHeadsRequest& request) = 0;
  virtual absl::StatusOr<v1::Head> GetHead(const v1::GetHeadRequest& request) = 0;
  virtual absl::StatusOr<v1::BeginWriteResponse> BeginWrite(const v1::BeginWriteRequest& request) = 0;
  virtual absl::StatusOr<v1::CommitWriteResponse> CommitWrite(const v1::CommitWriteRequest& request) = 0;
  // Takes as long as the server needs: no deadline.
  virtual absl::StatusOr<v1::LoadWeightsResponse> LoadWeights(const v1::LoadWeightsRequest& request) = 0;
  virtual absl::StatusOr<v1::OpenSessionResponse> OpenSession(const v1::OpenSessionRequest& request,
                                                              WhenFull when_full) = 0;
  virtual absl::StatusOr<v1::CloseSessionResponse> CloseSession(const v1::CloseSessionRequest& request) = 0;
  virtual absl::StatusOr<v1::LogitsResponse> Logits(const v1::LogitsRequest& request) = 0;
  virtual absl::StatusOr<v1::BeginFlushResponse> BeginFlush(const v1::BeginFlushRequest& request) = 0;
  virtual absl::StatusOr<v1::CommitFlushResponse> CommitFlush(const v1::CommitFlushRequest& request) = 0;
  virtual absl::StatusOr<v1::AbortFlushResponse> AbortFlush(const v1::AbortFlushRequest& request) = 0;
  // These have at least ten minutes for an attempt: they wait for disks.
  virtual absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request) = 0;
  virtual absl::StatusOr<v1::RestoreCheckpointResponse> RestoreCheckpoint(
      const v1::RestoreCheckpointRequest& request) = 0;
  virtual absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(
      const v1::ListCheckpointsRequest& request) = 0;
  virtual absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(
      const v1::DeleteCheckpointRequest& request) = 0;
  // One attempt: a server that is gone was drained.
  virtual absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request) = 0;
  virtual absl::StatusOr<v1::GradientStatsResponse> GradientStats(
      const v1::GradientStatsRequest& request) = 0;
  virtual absl::StatusOr<v1::ApplyStepResponse> ApplyStep(const v1::ApplyStepRequest& request) = 0;
  virtual absl::StatusOr<v1::CreateRegionResponse> CreateRegion(const v1::CreateRegionRequest& request) = 0;
  virtual absl::StatusOr<v1::DeleteRegionResponse> DeleteRegion(const v1::DeleteRegionRequest& request) = 0;
  virtual absl::StatusOr<v1::GetStatusResponse> GetStatus(const v1::GetStatusRequest& request) = 0;
  virtual absl::StatusOr<v1::GetMemoryResponse> GetMemory(const v1::GetMemoryRequest& request) = 0;

  // Streams: one attempt each, the caller resumes.
  virtual absl::Status ReadGradient(const v1::ReadGradientRequest& request, const RowSink& sink) = 0;
  virtual absl::Status ReadWeights(const v1::ReadWeightsRequest& request, const RowSink& sink) = 0;
  // Returns the number of rows the server confirms.
  virtual absl::StatusOr<int64_t> WriteWeights(const WeightSource& source) = 0;

  // A Compute call on a network connection of its own, whose answers are as large as `limits` let them be.
  virtual std::unique_ptr<ComputeStream> Compute(const v1::SessionLimits& limits) = 0;
};

// The server could not be reached, or wants to be asked again later: the same call may succeed.
bool IsTransient(const absl::Status& status);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_CONNECTION_H_
