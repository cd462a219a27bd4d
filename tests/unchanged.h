// A test program that asks nothing of the world says the same again until it changes.
#ifndef LOSSD_TESTS_UNCHANGED_H_
#define LOSSD_TESTS_UNCHANGED_H_

#include <string>
#include <vector>

namespace lossd::test_program {

enum class Hermetic { kNo, kYes };

// The report of a test program, and beside it what passed when it was written.
class Unchanged {
 public:
  // `output`: GTEST_OUTPUT, xml:PATH. If it is another, or the program is not hermetic, nothing is
  // remembered.
  Unchanged(const std::string& output, const std::vector<std::string>& arguments, Hermetic hermetic);

  // Whether this very program, its libraries, these arguments and settings and this processor passed before,
  // and the report of that is there.
  bool PassedBefore() const;
  // Before the tests: a report that is there tells of another run.
  void Forget() const;
  // The tests passed, but the program has yet to end well: tools/check_report.py makes this the note where
  // CTest says that it did.
  void OfferNote() const;

 private:
  std::string report_;
  std::string note_;
  std::string key_;  // empty: not to be remembered
};

}  // namespace lossd::test_program

#endif  // LOSSD_TESTS_UNCHANGED_H_
