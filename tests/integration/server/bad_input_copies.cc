// Wrong calls about copies of heads.
#include <limits>
#include <string>
#include <vector>

#include "tests/integration/server/bad_input.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;

// A copy of "h", whose window has a chunk.
v1::CopyHeadRequest CopyRequest(const std::string& name, const std::string& id) {
  v1::CopyHeadRequest request;
  request.set_source("h");
  request.set_name(name);
  request.set_frozen(true);
  request.set_copy_id(id);
  return request;
}

Outcome Copy(Environment& environment, const v1::CopyHeadRequest& request) {
  return Call(*environment.stubs().heads, &v1::HeadService::Stub::CopyHead, request);
}

// Puts half of "h" into a frozen copy of it.
v1::BlendHeadRequest BlendRequest(Environment& environment) {
  Copy(environment, CopyRequest("average", "average"));
  v1::BlendHeadRequest request;
  request.set_head("average");
  request.set_source("h");
  request.set_decay(0.5);
  request.set_blend_id("blend");
  return request;
}

Outcome Blend(Environment& environment, const v1::BlendHeadRequest& request) {
  return Call(*environment.stubs().heads, &v1::HeadService::Stub::BlendHead, request);
}

Outcome BlendWith(Environment& environment, double decay) {
  v1::BlendHeadRequest request = BlendRequest(environment);
  request.set_decay(decay);
  return Blend(environment, request);
}

}  // namespace

std::vector<Case> CopyCases() {
  return {
      {"copy_without_an_id",
       [](Environment& environment) { return Copy(environment, CopyRequest("copy", "")); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"copy_id has 0 bytes"},
       RejectReason::kOption},
      {"copy_with_a_long_id",
       [](Environment& environment) { return Copy(environment, CopyRequest("copy", std::string(257, 'i'))); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"copy_id has 257 bytes", "1 to 256"},
       RejectReason::kOption},
      {"copy_of_a_stranger",
       [](Environment& environment) {
         v1::CopyHeadRequest request = CopyRequest("copy", "id");
         request.set_source("stranger");
         return Copy(environment, request);
       },
       grpc::StatusCode::NOT_FOUND,
       {"'stranger' does not exist"},
       RejectReason::kUnknownHead},
      {"copy_onto_its_source",
       [](Environment& environment) { return Copy(environment, CopyRequest("h", "id")); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"name is h", "the source"},
       RejectReason::kOption},
      {"copy_onto_another_head",
       [](Environment& environment) {
         Copy(environment, CopyRequest("other", "other"));
         return Copy(environment, CopyRequest("other", "id"));
       },
       grpc::StatusCode::ALREADY_EXISTS,
       {"head other exists", "BlendHead"},
       RejectReason::kConflict},
      {"copy_with_a_name_that_is_a_path",
       [](Environment& environment) { return Copy(environment, CopyRequest("../etc", "id")); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"name must be"},
       RejectReason::kOption},
      {"copy_of_a_version_that_is_gone",
       [](Environment& environment) {
         v1::CopyHeadRequest request = CopyRequest("copy", "id");
         request.set_source_version(7);
         return Copy(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"source_version is 7", "of version 1", "no others are kept"},
       RejectReason::kWeightVersion},
      {"blend_without_an_id",
       [](Environment& environment) {
         v1::BlendHeadRequest request = BlendRequest(environment);
         request.clear_blend_id();
         return Blend(environment, request);
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"blend_id has 0 bytes"},
       RejectReason::kOption},
      {"blend_with_a_negative_decay",
       [](Environment& environment) { return BlendWith(environment, -0.1); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"decay is -0.1", "[0, 1]"},
       RejectReason::kOption},
      {"blend_with_a_decay_above_1",
       [](Environment& environment) { return BlendWith(environment, 1.1); },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"decay is 1.1", "[0, 1]"},
       RejectReason::kOption},
      {"blend_with_a_decay_that_is_no_number",
       [](Environment& environment) {
         return BlendWith(environment, std::numeric_limits<double>::quiet_NaN());
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"decay is nan"},
       RejectReason::kOption},
      {"blend_of_a_head_into_itself",
       [](Environment& environment) {
         v1::BlendHeadRequest request = BlendRequest(environment);
         request.set_source("average");
         return Blend(environment, request);
       },
       grpc::StatusCode::INVALID_ARGUMENT,
       {"source is average", "the target too"},
       RejectReason::kOption},
      {"blend_of_a_stranger",
       [](Environment& environment) {
         v1::BlendHeadRequest request = BlendRequest(environment);
         request.set_source("stranger");
         return Blend(environment, request);
       },
       grpc::StatusCode::NOT_FOUND,
       {"'stranger' does not exist"},
       RejectReason::kUnknownHead},
      {"blend_into_a_window_that_is_not_empty",
       [](Environment& environment) {
         v1::BlendHeadRequest request = BlendRequest(environment);
         request.set_head("h");
         request.set_source("average");
         return Blend(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"the window of head h is not empty", "a step or a flush"},
       RejectReason::kConflict},
      {"blend_of_another_version",
       [](Environment& environment) {
         v1::BlendHeadRequest request = BlendRequest(environment);
         request.set_target_version(7);
         return Blend(environment, request);
       },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"target_version is 7"},
       RejectReason::kWeightVersion},
  };
}

}  // namespace lossd::testing
