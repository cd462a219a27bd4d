// What a replica says of its heads when all of them meet, and what becomes of these when all have said so.
#ifndef LOSSD_SERVER_RPC_REPLICAS_MET_HEADS_H_
#define LOSSD_SERVER_RPC_REPLICAS_MET_HEADS_H_

#include <cstdint>

#include "server/engine/engine.h"
#include "server/engine/replicas/agreement.h"

namespace lossd::rpc {

// When nothing of an earlier epoch is under way. `history`: that of the set which it has settled with.
engine::MetReplica DescribeHeads(engine::Engine& engine, uint64_t history);
// Heads that are alike go on, and the others wait to go back to their newest checkpoints.
void GoOnOrAbandon(engine::Engine& engine, const engine::Agreement& agreement);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_MET_HEADS_H_
