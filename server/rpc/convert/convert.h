// Between the wire's data model and the engine's: the one file pair that names both.
#ifndef LOSSD_SERVER_RPC_CONVERT_CONVERT_H_
#define LOSSD_SERVER_RPC_CONVERT_CONVERT_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/region.pb.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/compute_wire.h"
#include "server/engine/checkpoint/checkpoint.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/head/head.h"
#include "server/engine/head/parts/head_copy.h"
#include "server/engine/regions/region_memory.h"

namespace lossd::rpc {

// INVALID_ARGUMENT naming `field` if the wire's value is none of ours. The second form takes `fallback` for
// UNSPECIFIED.
absl::StatusOr<kernels::DataType> ToEngine(v1::DataType type, const std::string& field);
absl::StatusOr<kernels::DataType> ToEngine(v1::DataType type, const std::string& field,
                                           kernels::DataType fallback);
v1::DataType ToProto(kernels::DataType type);

absl::StatusOr<engine::RegionKind> ToEngine(v1::RegionKind kind);
v1::RegionKind ToProto(engine::RegionKind kind);

absl::StatusOr<engine::HeadConfig> ToEngine(const v1::CreateHeadRequest& request);
absl::StatusOr<engine::OptimizerConfig> ToEngine(const v1::Optimizer& optimizer);
std::vector<engine::SessionMarks> ToEngine(const google::protobuf::RepeatedPtrField<v1::SessionMarks>& marks);
// INVALID_ARGUMENT if they are more than any window has.
absl::Status CheckMarks(const google::protobuf::RepeatedPtrField<v1::SessionMarks>& marks);

engine::StepRequest ToEngine(const v1::ApplyStepRequest& request);
engine::HeadCopy ToEngine(const v1::CopyHeadRequest& request);
engine::BlendRequest ToEngine(const v1::BlendHeadRequest& request);
void ToProto(const engine::HeadCopy& copy, v1::CopyHeadRequest* request);
// Without the target.
void ToProto(const engine::BlendRequest& blend, v1::BlendHeadRequest* request);
// Takes the hidden states.
absl::StatusOr<engine::LogitsRequest> ToEngine(v1::LogitsRequest* request);

// A request that holds a chunk. Takes its payload without copying it, unless it came in so small pieces that
// much more memory than it has would be kept with it. Never fails: what cannot be represented is noted in
// decode_status, and the chunk is rejected in its turn.
engine::Chunk ToEngine(wire::ReceivedRequest request);

void ToProto(const engine::CheckpointInfo& info, v1::Checkpoint* checkpoint);
// Without the teacher and its hidden states. INVALID_ARGUMENT of a divergence that there is not.
absl::StatusOr<kernels::Distillation> ToEngine(const v1::Distillation& proto);
engine::WantedReturns ToEngine(const v1::WantedReturns& wanted);
void ToProto(engine::TokenReturns returns, v1::TokenReturns* proto);
void ToProto(const engine::OptimizerConfig& config, v1::Optimizer* optimizer);
void ToProto(const engine::HeadConfig& config, v1::HeadConfig* proto);
void ToProto(const engine::HeadConfig& config, v1::CreateHeadRequest* request);
void ToProto(const engine::HeadInfo& info, v1::Head* head);
void ToProto(const engine::StepResult& step, v1::ApplyStepResponse* response);
void ToProto(const engine::MemoryItem& item, v1::MemoryItem* proto);
void ToProto(const engine::LaneMarks& marks, v1::LaneMarks* proto);
// The ComputeResponse with the answer as its result, which refers to its dX and frees it in the end.
grpc::ByteBuffer ToWire(engine::ChunkAnswer answer);

// A range of rows as asked for on the wire (rows == 0: to the end), checked against `vocab_size`.
struct RowRange {
  int64_t first_row = 0;
  int64_t rows = 0;
};
absl::StatusOr<RowRange> ToRowRange(int64_t first_row, int64_t rows, int64_t vocab_size);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONVERT_CONVERT_H_
