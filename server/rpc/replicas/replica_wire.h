// What replicas say to each other, to and from bytes (proto/lossd/group/v1/replica.proto).
#ifndef LOSSD_SERVER_RPC_REPLICAS_REPLICA_WIRE_H_
#define LOSSD_SERVER_RPC_REPLICAS_REPLICA_WIRE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "lossd/group/v1/replica.pb.h"
#include "lossd/v1/types.pb.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/chunk/session_marks.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/head/replica/part_rows.h"
#include "server/engine/replicas/agreement.h"

namespace lossd::rpc {

// Where and since when they are true, and what was accepted.
void ToProto(const std::vector<engine::SessionMarks>& named,
             google::protobuf::RepeatedPtrField<v1::SessionMarks>* proto);

// Without the fingerprint.
void ToProto(const std::string& head, const engine::WindowEnd& end, group::v1::SealWindow* proto);
engine::WindowEnd ToEnd(const group::v1::SealWindow& proto);

void ToProto(const engine::JointStep& step, group::v1::JointStep* proto);
engine::JointStep ToEngine(const group::v1::JointStep& proto);

void ToProto(const engine::FlushInfo& flush, group::v1::FlushSealed* proto);
engine::FlushInfo ToEngine(const group::v1::FlushSealed& proto);

void ToProto(const engine::PartRows& rows, group::v1::HeldRows* proto);
engine::PartRows ToEngine(const group::v1::HeldRows& proto);

void ToProto(const engine::MetReplica& replica, group::v1::ReplicaHello* proto);
engine::MetReplica ToEngine(const group::v1::ReplicaHello& proto);

// Equal for equal configurations, class weights included.
uint64_t FingerprintOf(const engine::HeadConfig& config);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_REPLICA_WIRE_H_
