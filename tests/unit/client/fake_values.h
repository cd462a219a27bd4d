// Helpers of the fake server's two halves: its books (fake_server.cc) and its services (fake_services.cc).
#ifndef LOSSD_TESTS_UNIT_CLIENT_FAKE_VALUES_H_
#define LOSSD_TESTS_UNIT_CLIENT_FAKE_VALUES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/src/common/convert.h"
#include "client/src/common/data_type.h"
#include "grpcpp/support/status.h"
#include "lossd/v1/types.pb.h"

namespace lossd::testing {

inline grpc::Status Cut() { return {grpc::StatusCode::UNAVAILABLE, "cut by the test"}; }

inline DataType TypeOf(v1::DataType type) { return internal::FromProto(type).value_or(DataType::kFloat32); }

inline std::vector<float> ToFloats(v1::DataType type, const std::string& bytes) {
  const auto count = static_cast<int64_t>(bytes.size()) / SizeOf(TypeOf(type));
  std::vector<float> values(static_cast<size_t>(count));
  internal::ConvertElements(TypeOf(type), bytes.data(), DataType::kFloat32, values.data(), count);
  return values;
}

inline std::string FromFloats(v1::DataType type, const float* values, int64_t count) {
  std::string bytes(static_cast<size_t>(count * SizeOf(TypeOf(type))), '\0');
  internal::ConvertElements(DataType::kFloat32, values, TypeOf(type), bytes.data(), count);
  return bytes;
}

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_UNIT_CLIENT_FAKE_VALUES_H_
