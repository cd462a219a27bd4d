// What a rank tells its leader of a chunk that it has answered.
#ifndef LOSSD_SERVER_RPC_GROUP_ANSWER_WIRE_H_
#define LOSSD_SERVER_RPC_GROUP_ANSWER_WIRE_H_

#include "lossd/group/v1/group.pb.h"
#include "server/engine/group/answered_chunk.h"

namespace lossd::rpc {

group::v1::Answered ToProto(engine::AnsweredChunk chunk);
// Whether it makes sense shows where its batch is known: engine::AwaitedAnswers.
engine::AnsweredChunk ToEngine(const group::v1::Answered& answered);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_ANSWER_WIRE_H_
