// Copies and blends of heads, from messages and to them.
#include "server/rpc/convert/convert.h"

namespace lossd::rpc {

using engine::HeadCopy;

HeadCopy ToEngine(const v1::CopyHeadRequest& request) {
  return {.source = request.source(),
          .name = request.name(),
          .training = request.frozen() ? HeadCopy::Training::kFrozen : HeadCopy::Training::kAsSource,
          .master = request.master_weights() ? HeadCopy::Master::kKept : HeadCopy::Master::kAsTrained,
          .source_version = request.source_version(),
          .copy_id = request.copy_id()};
}

void ToProto(const HeadCopy& copy, v1::CopyHeadRequest* request) {
  request->set_source(copy.source);
  request->set_name(copy.name);
  request->set_frozen(copy.training == HeadCopy::Training::kFrozen);
  request->set_master_weights(copy.master == HeadCopy::Master::kKept);
  request->set_source_version(copy.source_version);
  request->set_copy_id(copy.copy_id);
}

engine::BlendRequest ToEngine(const v1::BlendHeadRequest& request) {
  return {.source = request.source(),
          .decay = request.decay(),
          .blend_id = request.blend_id(),
          .source_version = request.source_version(),
          .target_version = request.target_version()};
}

void ToProto(const engine::BlendRequest& blend, v1::BlendHeadRequest* request) {
  request->set_source(blend.source);
  request->set_decay(blend.decay);
  request->set_blend_id(blend.blend_id);
  request->set_source_version(blend.source_version);
  request->set_target_version(blend.target_version);
}

}  // namespace lossd::rpc
