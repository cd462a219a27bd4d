// Between the public types of lossd/client.h and the messages of lossd.v1. Pure functions.
#ifndef LOSSD_CLIENT_SRC_COMMON_CONVERT_H_
#define LOSSD_CLIENT_SRC_COMMON_CONVERT_H_

#include <span>

#include "absl/status/statusor.h"
#include "google/protobuf/repeated_field.h"
#include "lossd/client.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/status.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::internal {

v1::DataType ToProto(DataType type);
// INTERNAL if the server named a type this client does not know.
absl::StatusOr<DataType> FromProto(v1::DataType type);

v1::HeadConfig ToProto(const HeadConfig& config);
v1::CreateHeadRequest ToRequest(const HeadConfig& config);
// Without class weights; whether there are any is not in it.
absl::StatusOr<HeadConfig> FromProto(const v1::HeadConfig& config);
absl::StatusOr<HeadInfo> FromProto(const v1::Head& head);
CheckpointInfo FromProto(const v1::Checkpoint& checkpoint);
absl::StatusOr<ServerStatus> FromProto(const v1::GetStatusResponse& response);
ServerMemory FromProto(const v1::GetMemoryResponse& response);

// Without head, generation and marks.
v1::ApplyStepRequest ToProto(const StepOptions& options);
StepResult FromProto(const v1::ApplyStepResponse& response);
GradientStats FromProto(const v1::GradientStatsResponse& response);

v1::SessionMarks ToProto(const SessionMarks& marks);
SessionMarks FromProto(const v1::SessionMarks& marks);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_COMMON_CONVERT_H_
