// Which statuses are the server's own, and which were made on the way to it.
#include "client/src/connection/grpc_status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "lossd/v1/types.pb.h"

namespace lossd::internal::grpc_status_test {
namespace {

struct Case {
  grpc::StatusCode code;
  const char* message;
  absl::StatusCode unmarked;  // as gRPC or a proxy says it
  absl::StatusCode marked;    // as lossd says it
  const char* words;          // of the unmarked one
};

using grpc::StatusCode;
constexpr auto kBroken = absl::StatusCode::kUnavailable;

constexpr Case kCases[] = {
    {StatusCode::INTERNAL, "Received RST_STREAM with error code 2", kBroken, absl::StatusCode::kInternal,
     "cut on its way"},
    {StatusCode::RESOURCE_EXHAUSTED, "Received RST_STREAM with error code 11", kBroken,
     absl::StatusCode::kResourceExhausted, "cut on its way"},
    {StatusCode::PERMISSION_DENIED, "Received RST_STREAM with error code 12", kBroken,
     absl::StatusCode::kPermissionDenied, "cut on its way"},
    {StatusCode::INTERNAL, "Bad GRPC frame type 0x3c", kBroken, absl::StatusCode::kInternal,
     "cut on its way"},
    {StatusCode::UNKNOWN, "Stream removed", kBroken, absl::StatusCode::kUnknown, "cut on its way"},
    {StatusCode::UNKNOWN, "", kBroken, absl::StatusCode::kUnknown, "no reason"},
    {StatusCode::UNKNOWN, "stream timeout", kBroken, absl::StatusCode::kUnknown, "limit on time"},
    {StatusCode::DEADLINE_EXCEEDED, "upstream request timeout", kBroken, absl::StatusCode::kDeadlineExceeded,
     "cut on its way"},
    {StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded", absl::StatusCode::kDeadlineExceeded,
     absl::StatusCode::kDeadlineExceeded, "Deadline Exceeded"},
    {StatusCode::CANCELLED, "Received RST_STREAM with error code 8", kBroken, kBroken, "cut on its way"},
    {StatusCode::UNAVAILABLE, "Received http2 header with status: 502", kBroken, kBroken, "HTTP 502"},
    {StatusCode::UNKNOWN, "Received http2 header with status: 500", kBroken, absl::StatusCode::kUnknown,
     "HTTP 500"},
    {StatusCode::UNKNOWN, "Received http2 header with status: 408", kBroken, absl::StatusCode::kUnknown,
     "HTTP 408"},
    {StatusCode::UNIMPLEMENTED, "Received http2 header with status: 404", kBroken,
     absl::StatusCode::kUnimplemented, "HTTP 404"},
    {StatusCode::PERMISSION_DENIED, "Received http2 header with status: 403", kBroken,
     absl::StatusCode::kPermissionDenied, "HTTP 403"},
    {StatusCode::UNKNOWN, "Received http2 header with status: 413", absl::StatusCode::kResourceExhausted,
     absl::StatusCode::kUnknown, "client_max_body_size"},
    // Answers of servers, which gRPC may have made: they may be without details.
    {StatusCode::UNIMPLEMENTED, "", absl::StatusCode::kUnimplemented, absl::StatusCode::kUnimplemented, ""},
    {StatusCode::PERMISSION_DENIED, "not this role", absl::StatusCode::kPermissionDenied,
     absl::StatusCode::kPermissionDenied, "not this role"},
    {StatusCode::NOT_FOUND, "no head", absl::StatusCode::kNotFound, absl::StatusCode::kNotFound, "no head"},
};

TEST(GrpcStatusTest, WhatWasMadeOnTheWayIsABrokenConnection) {
  for (const Case& given : kCases) {
    SCOPED_TRACE(given.message);
    const absl::Status unmarked = FromGrpcStatus({given.code, given.message});
    EXPECT_EQ(unmarked.code(), given.unmarked);
    EXPECT_THAT(std::string(unmarked.message()), ::testing::HasSubstr(given.words));
    v1::RichStatus rich;
    rich.set_code(given.code);
    EXPECT_EQ(FromGrpcStatus({given.code, given.message, rich.SerializeAsString()}).code(), given.marked);
  }
}

}  // namespace
}  // namespace lossd::internal::grpc_status_test
