#include "server/engine/group/awaited_answers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"

namespace lossd::engine {

void AwaitedAnswers::Start(const StartBatchCommand& command) {
  ++started_;
  if (command.kind.holder == 0) return;
  Batch batch{.holder = command.kind.holder, .returns = command.kind.returns, .tokens = {}};
  for (const ChunkHeader& chunk : command.chunks) batch.tokens.push_back(chunk.tokens);
  batches_.emplace(started_, std::move(batch));
}

absl::Status AwaitedAnswers::Take(int32_t rank, const AnsweredChunk& chunk) {
  const auto found = batches_.find(chunk.batch);
  if (found == batches_.end() || found->second.holder != rank || found->second.answered != chunk.chunk) {
    return absl::InternalError(
        absl::StrCat("nobody waits for chunk ", chunk.chunk, " of batch ", chunk.batch));
  }
  Batch& batch = found->second;
  const int64_t tokens = batch.tokens[batch.answered];
  if (!IsAnswer(tokens, batch.returns, chunk.losses, chunk.returns)) {
    return absl::InternalError(absl::StrCat("chunk ", chunk.chunk, " of batch ", chunk.batch,
                                            " has another answer than its ", tokens, " tokens want"));
  }
  if (++batch.answered == batch.tokens.size()) batches_.erase(found);
  return absl::OkStatus();
}

absl::Status AwaitedAnswers::CheckApplied(int32_t rank, uint64_t batch) const {
  const auto found = batches_.find(batch);
  if (found == batches_.end() || found->second.holder != rank) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("it has applied batch ", batch, " without answering all of it"));
}

}  // namespace lossd::engine
