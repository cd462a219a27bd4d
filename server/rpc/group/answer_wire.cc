#include "server/rpc/group/answer_wire.h"

#include <utility>

#include "server/rpc/convert/convert.h"

namespace lossd::rpc {

group::v1::Answered ToProto(engine::AnsweredChunk chunk) {
  group::v1::Answered answered;
  answered.set_batch(chunk.batch);
  answered.set_chunk(chunk.chunk);
  answered.set_losses(std::move(chunk.losses));
  ToProto(std::move(chunk.returns), answered.mutable_returns());
  return answered;
}

engine::AnsweredChunk ToEngine(const group::v1::Answered& answered) {
  return {.batch = answered.batch(),
          .chunk = answered.chunk(),
          .losses = answered.losses(),
          .returns = ToEngine(answered.returns())};
}

}  // namespace lossd::rpc
