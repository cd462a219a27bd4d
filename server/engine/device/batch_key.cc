#include "server/engine/device/batch_key.h"

#include "server/engine/chunk/chunk_options.h"

namespace lossd::engine {
namespace {

ClassWeights ClassWeightsOf(const Chunk& chunk, const HeadConfig& head) {
  return chunk.options.class_weights.value_or(head.class_weights == nullptr ? ClassWeights::kIgnore
                                                                            : ClassWeights::kUse);
}

}  // namespace

BatchKey KindOf(const Chunk& chunk, const HeadConfig& head, const HeadConfig* teacher,
                const HeadBackend* teacher_backend) {
  const ChunkOptions& options = chunk.options;
  BatchKey kind;
  kind.hidden_type = chunk.hidden_type;
  if (HasInputGradient(chunk.mode)) kind.dx_type = chunk.dx_type;
  kind.mode = chunk.mode;
  kind.options = options.loss;
  if (!options.sets_logit_scale) kind.options.logit_scale = head.logit_scale;
  if (!options.sets_softcap) kind.options.softcap = head.softcap;
  kind.class_weights = ClassWeightsOf(chunk, head);
  kind.bias = options.bias.value_or(head.bias ? Bias::kUse : Bias::kIgnore);
  kind.returns = ReturnsOf(chunk);
  kind.entropy_gradients = HasWeightGradient(chunk.mode) && !chunk.entropy_gradients.empty();
  kind.holds = chunk.hold.number != 0;
  kind.lists = ListKindOf(chunk);
  if (head.fixed_segments) kind.segments = kernels::Segments::kFixed;
  kind.holder = chunk.holder();
  if (teacher != nullptr) {
    kind.teacher = {.backend = teacher_backend,
                    .hidden_size = teacher->hidden_size,
                    .weight_type = teacher->weight_type,
                    .hidden_type = options.distillation->hidden_type,
                    .distillation = options.distillation->loss};
    // `beta` matters only to Jensen-Shannon: other chunks that differ in it alone may share a batch.
    if (kind.teacher.distillation.divergence != kernels::Divergence::kJensenShannon) {
      kind.teacher.distillation.beta = kernels::Distillation().beta;
    }
  }
  return kind;
}

}  // namespace lossd::engine
