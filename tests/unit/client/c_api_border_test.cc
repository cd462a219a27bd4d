// What the C interface does with exceptions and with statuses, which a server cannot be made to cause.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

#include "client/src/c_api/status.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/gradient/open_commit.h"

namespace {
bool no_memory = false;
}  // namespace

// GCC sees one half of each pair where it is not inlined.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void* operator new(std::size_t size) {
  void* memory = no_memory ? nullptr : std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }

namespace lossd::c_api::c_api_border_test {
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

TEST(CApiBorderTest, AStatusTellsWhichFlushItIsAbout) {
  const absl::Status lost_answer = absl::UnavailableError("no answer");
  lossd_status* of_flush =
      Guarded([&] { return internal::WithFlush(lost_answer, {.flush_id = "flush-7", .generation = 3}); });
  EXPECT_STREQ(lossd_status_flush_id(of_flush), "flush-7");
  lossd_status_free(of_flush);
  lossd_status* of_others = Guarded([&] { return lost_answer; });
  EXPECT_STREQ(lossd_status_flush_id(of_others), "");
  lossd_status_free(of_others);
  EXPECT_STREQ(lossd_status_flush_id(nullptr), "");
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

// From the moment that it is asked what it is there is no memory.
struct LastError : std::exception {
  const char* what() const noexcept override {
    no_memory = true;
    return "a text that is too long to be kept without memory of its own";
  }
};

TEST(CApiBorderTest, WithoutMemoryForAnExceptionThereIsStillAStatus) {
  lossd_status* status = Guarded([]() -> absl::Status { throw LastError(); });
  no_memory = false;
  ExpectStatus(status, LOSSD_RESOURCE_EXHAUSTED, "no memory");
}

}  // namespace
}  // namespace lossd::c_api::c_api_border_test
