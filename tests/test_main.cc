// The main function of every test program. A program holds the tests of a folder; CTest runs them file by
// file, each in a process of its own: PROGRAM --test_file=step_test runs those of step_test.cc, in whatever
// folder that is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <iostream>
#include <string>
#include <string_view>

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

int Main(int argc, char** argv) {
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
  return RUN_ALL_TESTS();
}

}  // namespace
}  // namespace lossd

int main(int argc, char** argv) { return lossd::Main(argc, argv); }
