// Wrong calls about heads that are put aside.
#include <string>
#include <vector>

#include "tests/integration/server/bad_input.h"

namespace lossd::testing {
namespace {

using engine::RejectReason;

Outcome Park(Environment& environment, const std::string& name) {
  v1::ParkHeadRequest request;
  request.set_name(name);
  return Call(*environment.stubs().heads, &v1::HeadService::Stub::ParkHead, request);
}

}  // namespace

std::vector<Case> ParkingCases() {
  return {
      {"park_a_stranger",
       [](Environment& environment) { return Park(environment, "stranger"); },
       grpc::StatusCode::NOT_FOUND,
       {"'stranger' does not exist"},
       RejectReason::kUnknownHead},
      {"park_without_a_name",
       [](Environment& environment) { return Park(environment, ""); },
       grpc::StatusCode::NOT_FOUND,
       {"'' does not exist"},
       RejectReason::kUnknownHead},
      {"park_a_head_with_a_session",
       [](Environment& environment) { return Park(environment, "h"); },
       grpc::StatusCode::FAILED_PRECONDITION,
       {"head h is in use", "1 open session", "close"},
       RejectReason::kConflict},
      {"park_more_than_there_is_room_for",
       [](Environment& environment) {
         CreateHead(environment.stubs(), "large", 8192, 64);
         return Park(environment, "large");
       },
       grpc::StatusCode::RESOURCE_EXHAUSTED,
       {"not enough memory for parking head large", "--parking_bytes"},
       RejectReason::kOutOfMemory},
  };
}

}  // namespace lossd::testing
