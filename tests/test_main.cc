// The main function of every test program. A program holds the tests of a folder; CTest runs them file by
// file, each in a process of its own: PROGRAM --test_file=step_test runs those of step_test.cc, in whatever
// folder that is.
//
// With LOSSD_UNCHANGED=pass in the environment (./check.sh sets it) what passed before is not run again while
// the program, its libraries and the processor are the same: LOSSD_HERMETIC says that its result depends on
// nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/crypto.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/unchanged.h"

namespace lossd {
namespace {

constexpr std::string_view kFileFlag = "--test_file=";

// The filter of all tests that stand in `file` (its name without folder and suffix); empty if there is none.
std::string FilterOf(std::string_view file) {
  std::string filter;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      if (std::filesystem::path(test.file()).stem() != file) continue;
      filter.append(filter.empty() ? "" : ":").append(suite.name()).append(".").append(test.name());
    }
  }
  return filter;
}

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool AnyWasSkipped() { return testing::UnitTest::GetInstance()->skipped_test_count() > 0; }

bool NothingWasRun() {
  return !testing::GTEST_FLAG(list_tests) && testing::UnitTest::GetInstance()->test_to_run_count() == 0;
}

int Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  testing::InitGoogleMock(&argc, argv);
  if (argc > 1) {
    const std::string_view argument = argv[1];
    const std::string filter =
        argument.starts_with(kFileFlag) ? FilterOf(argument.substr(kFileFlag.size())) : std::string();
    if (filter.empty()) {
      std::cerr << argv[0] << ": no test is in the file that '" << argument
                << "' names; give --test_file=NAME_test, or --gtest_filter=SUITE.TEST\n";
      return 2;
    }
    testing::GTEST_FLAG(filter) = filter;
  }
  const test_program::Unchanged unchanged(
      Environment("GTEST_OUTPUT"), arguments,
      Environment("LOSSD_HERMETIC").empty() ? test_program::Hermetic::kNo : test_program::Hermetic::kYes);
  const bool may_pass = Environment("LOSSD_UNCHANGED") == "pass";
  if (may_pass && unchanged.PassedBefore()) {
    std::cout << "unchanged since it passed\n";
    return 0;
  }
  unchanged.Forget();
  const int status = RUN_ALL_TESTS();
  if (NothingWasRun()) {
    std::cerr << argv[0] << ": there was no test to run\n";
    return 1;
  }
  if (may_pass && status == 0 && !AnyWasSkipped()) unchanged.OfferNote();
  return status;
}

}  // namespace
}  // namespace lossd

int main(int argc, char** argv) {
  // At the end of the process OpenSSL would clean up while threads of gRPC may still be in it: what such a
  // thread keeps there is then never freed, and LeakSanitizer says so.
  (void)OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  return lossd::Main(argc, argv);
}
