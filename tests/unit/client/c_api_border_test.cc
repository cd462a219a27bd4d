// What the C interface does with exceptions and with statuses, which a server cannot be made to cause.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <stdexcept>

#include "client/src/c_api/status.h"
#include "client/src/grpc_status.h"

namespace lossd::c_api {
namespace {

using ::testing::HasSubstr;

// Code and message of a status, which is freed.
void ExpectStatus(lossd_status* status, int32_t code, const char* words) {
  ASSERT_NE(status, nullptr);
  EXPECT_EQ(lossd_status_code(status), code);
  EXPECT_THAT(lossd_status_message(status), HasSubstr(words));
  lossd_status_free(status);
}

TEST(CApiBorderTest, SuccessIsNull) {
  EXPECT_EQ(Guarded([] { return absl::OkStatus(); }), nullptr);
}

TEST(CApiBorderTest, CodesAreThoseOfGrpc) {
  for (int32_t code = LOSSD_CANCELLED; code <= LOSSD_UNAUTHENTICATED; ++code) {
    ExpectStatus(Guarded([&] { return absl::Status(static_cast<absl::StatusCode>(code), "so it is"); }), code,
                 "so it is");
  }
}

TEST(CApiBorderTest, ALostWindowHasACodeOfItsOwn) {
  ExpectStatus(Guarded([] { return internal::WindowLostError("the head", 7, "gone"); }), LOSSD_WINDOW_LOST,
               "the head");
}

TEST(CApiBorderTest, ExceptionsBecomeStatuses) {
  ExpectStatus(Guarded([]() -> absl::Status { throw std::runtime_error("what it says"); }), LOSSD_INTERNAL,
               "what it says");
  ExpectStatus(Guarded([]() -> absl::Status { throw 7; }), LOSSD_INTERNAL, "unknown type");
}

TEST(CApiBorderTest, WithoutMemoryThereIsStillAStatusAsOftenAsItIsNeeded) {
  for (int i = 0; i < 2; ++i) {
    ExpectStatus(Guarded([]() -> absl::Status { throw std::bad_alloc(); }), LOSSD_RESOURCE_EXHAUSTED,
                 "no memory");
  }
}

}  // namespace
}  // namespace lossd::c_api
