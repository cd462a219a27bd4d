// At the coordinator: heads are created and deleted, and writes published, at all replicas or at none.
#ifndef LOSSD_SERVER_RPC_REPLICAS_JOINT_HEADS_H_
#define LOSSD_SERVER_RPC_REPLICAS_JOINT_HEADS_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/engine.h"
#include "server/rpc/replicas/replica_questions.h"

namespace lossd::rpc {

// All of these wait. engine::ReplicaLost if one was lost meanwhile: asked again, they do what is missing.

// The head is at all others.
absl::Status CreateAtOthers(const OtherReplicas& others, const engine::HeadConfig& config);
// Has the other replicas make a copy that was made here, of the version that was copied here.
absl::Status CopyAtOthers(const OtherReplicas& others, const engine::HeadCopy& copy);
// The head is at all others, in the place of heads of another configuration; what is created stays, whatever
// happens.
absl::Status ReplaceAtOthers(const OtherReplicas& others, const engine::HeadConfig& config);
// Without a word to anybody but those who use it.
absl::Status DropHeadAtOthers(const OtherReplicas& others, const std::string& name);
// It is at none of them, and delete_here has deleted it here: whether one of the others had it. That is
// called when all of them take no chunks any more, and an error of its is the end. FAILED_PRECONDITION, and
// it is still at all, if one has a gradient that is not to be discarded. Whoever is lost once delete_here is
// done, it is at none in the next epoch.
absl::StatusOr<bool> DeleteAtAll(const OtherReplicas& others, const std::string& name,
                                 engine::Engine::DiscardGradient discard,
                                 absl::FunctionRef<absl::Status()> delete_here);
// Publishes a write that is prepared here at all replicas, or gives it up everywhere, and answers who waits
// for it. Where some may have published it, and some not, `lose` is told why the epoch is to end.
void PublishAtAll(const OtherReplicas& others, const std::shared_ptr<engine::Head>& head,
                  const engine::StagedWrite& write, const std::function<void(const absl::Status& why)>& lose);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_JOINT_HEADS_H_
