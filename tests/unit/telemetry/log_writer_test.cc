#include "server/telemetry/common/log_writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace lossd::telemetry::log_writer_test {
namespace {

std::string Dropped(int64_t lines) { return absl::StrCat("dropped ", lines, "\n"); }

class Pipe {
 public:
  explicit Pipe(int flags) { EXPECT_EQ(pipe2(ends_.data(), O_CLOEXEC | flags), 0); }
  ~Pipe() {
    CloseReader();
    close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int writer() const { return ends_[1]; }
  void CloseReader() {
    if (ends_[0] >= 0) close(ends_[0]);
    ends_[0] = -1;
  }
  std::string ReadLine() {
    fcntl(ends_[0], F_SETFL, 0);
    std::string line;
    char one = 0;
    while (read(ends_[0], &one, 1) == 1 && one != '\n') line += one;
    return line;
  }

 private:
  std::array<int, 2> ends_{};
};

// By the flags of the pipe: another process may have set O_NONBLOCK.
class LogWriterOn : public ::testing::TestWithParam<int> {};

TEST_P(LogWriterOn, NothingWaitsForAReaderAndTheReaderLearnsWhatItMissed) {
  Pipe pipe(GetParam());
  LogWriter writer(pipe.writer(), Dropped);
  const absl::Cleanup no_reader = [&pipe] { pipe.CloseReader(); };  // the writer may wait for one
  constexpr int kLines = 1000;
  const std::string longer_than_a_page(6000, 'x');  // far more than a pipe and the queue hold
  for (int line = 0; line < kLines; ++line) writer.Write(absl::StrCat(line, " ", longer_than_a_page, "\n"));
  ASSERT_GT(writer.dropped(), 0);
  writer.Flush(std::chrono::milliseconds(1));
  int next = 0;
  int missed = 0;
  while (next < kLines) {
    const std::string line = pipe.ReadLine();
    absl::string_view count = line;
    if (absl::ConsumePrefix(&count, "dropped ")) {
      int dropped = 0;
      ASSERT_TRUE(absl::SimpleAtoi(count, &dropped)) << line;
      next += dropped;
      missed += dropped;
    } else {
      ASSERT_EQ(line, absl::StrCat(next++, " ", longer_than_a_page));
    }
  }
  EXPECT_EQ(missed, writer.dropped());
  writer.Write("after\n");
  EXPECT_EQ(pipe.ReadLine(), "after");
}

INSTANTIATE_TEST_SUITE_P(Pipes, LogWriterOn, ::testing::Values(0, O_NONBLOCK));

TEST(LogWriter, LinesWithoutAReaderAreCounted) {
  Pipe pipe(0);
  pipe.CloseReader();
  LogWriter writer(pipe.writer(), Dropped);
  writer.Write("one\n");
  writer.Flush(std::chrono::minutes(1));
  EXPECT_EQ(writer.dropped(), 1);
}

TEST(LogWriter, ALineThatIsTooLongIsDroppedAndTheOthersAreNot) {
  Pipe pipe(0);
  LogWriter writer(pipe.writer(), Dropped);
  writer.Write(std::string(LogWriter::kMostBytes + 1, 'x'));
  EXPECT_EQ(pipe.ReadLine(), "dropped 1");
  writer.Write("after\n");
  EXPECT_EQ(pipe.ReadLine(), "after");
}

TEST(LogWriter, FlushWaitsForTheReader) {
  Pipe pipe(0);
  LogWriter writer(pipe.writer(), Dropped);
  writer.Write("one\n");
  writer.Write("two\n");
  writer.Flush(std::chrono::minutes(1));
  EXPECT_EQ(pipe.ReadLine(), "one");
  EXPECT_EQ(pipe.ReadLine(), "two");
  EXPECT_EQ(writer.dropped(), 0);
}

TEST(LogWriter, TheLastLineGoesByAFullPipe) {
  Pipe pipe(0);
  WriteLastLine(pipe.writer(), "first\n");
  EXPECT_EQ(pipe.ReadLine(), "first");
  const std::string full(static_cast<size_t>(fcntl(pipe.writer(), F_GETPIPE_SZ)), 'x');
  ASSERT_EQ(write(pipe.writer(), full.data(), full.size()), static_cast<ssize_t>(full.size()));
  WriteLastLine(pipe.writer(), "last\n");  // returns
}

}  // namespace
}  // namespace lossd::telemetry::log_writer_test
