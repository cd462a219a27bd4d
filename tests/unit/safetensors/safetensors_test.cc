// Safetensors files: what the writer makes the reader gives back bit for bit; no failure leaves a file under
// the final name or a temporary file behind; no header, however hostile, is believed.
#include "proto/safetensors/safetensors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/safetensors/safetensors_fixture.h"

namespace lossd::safetensors_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::OneTensor;
using testing::RawFile;
using testing::SafetensorsTest;
namespace fs = std::filesystem;

std::vector<std::byte> Pattern(size_t size) {
  std::vector<std::byte> bytes(size);
  uint32_t state = 1;
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}

std::string ReadRaw(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// Lowers the process's file-size limit for its own lifetime.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &old_limit_);
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit = old_limit_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_limit_);
    std::signal(SIGXFSZ, old_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit old_limit_{};
  void (*old_handler_)(int) = nullptr;
};

TEST_F(SafetensorsTest, WhatIsWrittenInPiecesIsReadBackBitForBit) {
  const auto bytes = Pattern(3 * 5 * 4 + 7 * 2 + 2);
  auto writer = SafetensorsWriter::Create(
      Path("a.safetensors"),
      {{.name = "w", .dtype = SafetensorsType::kFloat32, .shape = {3, 5}},
       {.name = "b \"quoted\" é", .dtype = SafetensorsType::kBFloat16, .shape = {7}},
       {.name = "scalar", .dtype = SafetensorsType::kFloat16, .shape = {}},
       {.name = "empty", .dtype = SafetensorsType::kFloat16, .shape = {0, 4}}},
      {{"format", "pt"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (size_t at = 0; at < bytes.size(); at += 11) {
    ASSERT_TRUE(writer->Append(std::span(bytes).subspan(at, std::min<size_t>(11, bytes.size() - at))).ok());
  }
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_THAT(Files(), ElementsAre("a.safetensors"));

  auto file = SafetensorsFile::Open(Path("a.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata().at("format"), "pt");
  auto w = file->Find("w");
  ASSERT_TRUE(w.ok()) << w.status();
  EXPECT_EQ(w->dtype, SafetensorsType::kFloat32);
  EXPECT_THAT(w->shape, ElementsAre(3, 5));
  ASSERT_EQ(w->data.size(), 60U);
  EXPECT_EQ(std::memcmp(w->data.data(), bytes.data(), 60), 0);
  auto b = file->Find("b \"quoted\" é");
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(b->dtype, SafetensorsType::kBFloat16);
  EXPECT_EQ(std::memcmp(b->data.data(), bytes.data() + 60, 14), 0);
  auto scalar = file->Find("scalar");
  ASSERT_TRUE(scalar.ok()) << scalar.status();
  EXPECT_EQ(scalar->dtype, SafetensorsType::kFloat16);
  EXPECT_EQ(scalar->data.size(), 2U);
  EXPECT_EQ(file->Find("empty")->data.size(), 0U);

  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, ReadRaw(Path("a.safetensors")).data(), 8);
  EXPECT_EQ(header_bytes % 8, 0U) << "tensor data is not aligned";
}

TEST_F(SafetensorsTest, ViewsOutliveAMoveOfTheFile) {
  WriteRaw("a", RawFile(R"({"t":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}})", 4));
  auto file = SafetensorsFile::Open(Path("a"));
  ASSERT_TRUE(file.ok());
  auto view = file->Find("t");
  SafetensorsFile moved = *std::move(file);
  EXPECT_EQ(view->data[3], std::byte{1});
  EXPECT_EQ(moved.Find("t")->data.data(), view->data.data());
}

TEST_F(SafetensorsTest, WithoutFinishNothingIsLeftAndAnOldFileStaysWhole) {
  WriteRaw("a.safetensors", "old");
  {
    auto writer = SafetensorsWriter::Create(Path("a.safetensors"), {{.name = "w", .shape = {100}}});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Append(Pattern(40)).ok());
    EXPECT_EQ(Files().size(), 2U);
    SafetensorsWriter moved = *std::move(writer);
    EXPECT_EQ(Files().size(), 2U) << "moving removed the temporary file";
  }
  EXPECT_THAT(Files(), ElementsAre("a.safetensors"));
  EXPECT_EQ(ReadRaw(Path("a.safetensors")), "old");
}

TEST_F(SafetensorsTest, FinishReplacesAnOldFile) {
  WriteRaw("a.safetensors", "old");
  auto writer = SafetensorsWriter::Create(Path("a.safetensors"), {{.name = "w", .shape = {2}}});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append(Pattern(8)).ok());
  EXPECT_EQ(ReadRaw(Path("a.safetensors")), "old");
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_TRUE(SafetensorsFile::Open(Path("a.safetensors")).ok());
  EXPECT_FALSE(writer->Append(Pattern(1)).ok());
  EXPECT_FALSE(writer->Finish().ok());
  EXPECT_THAT(Files(), ElementsAre("a.safetensors"));
}

TEST_F(SafetensorsTest, LinksAreFollowedAndModesKept) {
  fs::create_directory(Path("big"));
  for (const bool dangling : {false, true}) {
    for (const std::string& to : {std::string("big/real"), Path("big/real"), std::string("second")}) {
      SCOPED_TRACE(to + (dangling ? ", dangling" : ""));
      fs::remove(Path("link"));
      fs::remove(Path("second"));
      fs::remove(Path("big/real"));
      fs::create_symlink("big/real", Path("second"));
      fs::create_symlink(to, Path("link"));
      if (!dangling) {
        WriteRaw("big/real", "old");
        ASSERT_EQ(chmod(Path("big/real").c_str(), 0664), 0);
      }
      auto writer = SafetensorsWriter::Create(Path("link"), {{.name = "w", .shape = {0}}});
      ASSERT_TRUE(writer.ok()) << writer.status();
      ASSERT_TRUE(writer->Finish().ok());
      EXPECT_EQ(fs::read_symlink(Path("link")), to);
      EXPECT_TRUE(fs::is_symlink(Path("second")));
      EXPECT_EQ(SafetensorsFile::Open(Path("big/real")).status(), absl::OkStatus());
      if (!dangling) {
        EXPECT_EQ(fs::status(Path("big/real")).permissions(), fs::perms(0664));
      }
    }
  }
  // A file that this process has open, however it is named.
  const int file = open(Path("big/real").c_str(), O_RDONLY);
  for (const char* folder : {"/dev/fd/", "/proc/self/fd/"}) {
    EXPECT_EQ(SafetensorsWriter::Create(folder + std::to_string(file), {}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  close(file);
  fs::create_symlink("circle", Path("circle"));
  EXPECT_EQ(SafetensorsWriter::Create(Path("circle"), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SafetensorsTest, TooFewOrTooManyBytesAreRefused) {
  auto few = SafetensorsWriter::Create(Path("few"), {{.name = "w", .shape = {2}}});
  ASSERT_TRUE(few.ok());
  ASSERT_TRUE(few->Append(Pattern(7)).ok());
  absl::Status status = few->Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("7 bytes appended; the tensors need 8"));

  auto many = SafetensorsWriter::Create(Path("many"), {{.name = "w", .shape = {2}}});
  ASSERT_TRUE(many.ok());
  ASSERT_TRUE(many->Append(Pattern(8)).ok());
  EXPECT_EQ(many->Append(Pattern(1)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(many->Finish().ok()) << "finished a file that was overrun";
  EXPECT_FALSE(fs::exists(Path("few")));
  EXPECT_FALSE(fs::exists(Path("many")));
}

TEST_F(SafetensorsTest, AFullDiskIsResourceExhaustedAndLeavesNothing) {
  {
    auto writer = SafetensorsWriter::Create(Path("w"), {{.name = "w", .shape = {1 << 16}}});
    ASSERT_TRUE(writer.ok());
    FileSizeLimit limit(100'000);
    absl::Status status;
    for (int piece = 0; piece < 4 && status.ok(); ++piece) status = writer->Append(Pattern(1 << 16));
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(Path("w")));
    EXPECT_THAT(std::string(status.message()), HasSubstr("free space"));
    EXPECT_EQ(writer->Finish(), status) << "the first error is not kept";
  }
  EXPECT_TRUE(Files().empty());
}

TEST_F(SafetensorsTest, WhatCannotBeWrittenIsRefusedAtOnce) {
  EXPECT_EQ(SafetensorsWriter::Create(Path("no/such/w"), {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsWriter::Create(directory_, {}).status().code(), absl::StatusCode::kInvalidArgument);
  // No code of a server's state, which would get its advice.
  WriteRaw("plain", "");
  EXPECT_EQ(SafetensorsWriter::Create(Path("plain/w"), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open(Path("plain/w")).status().code(), absl::StatusCode::kInvalidArgument);
  fs::remove(Path("plain"));
  EXPECT_EQ(SafetensorsWriter::Create("/dev/null", {}).status().code(), absl::StatusCode::kInvalidArgument)
      << "a device would be replaced by a file";
  using Tensors = std::vector<SafetensorsTensor>;
  const int64_t huge = int64_t{1} << 40;
  for (const Tensors& tensors :
       {Tensors{{.name = "a", .shape = {1}}, {.name = "a", .shape = {2}}},
        Tensors{{.name = "__metadata__", .shape = {1}}}, Tensors{{.name = "\xff", .shape = {1}}},
        Tensors{{.name = "a", .shape = {-1}}}, Tensors{{.name = "a", .shape = {huge, huge}}}}) {
    EXPECT_EQ(SafetensorsWriter::Create(Path("w"), tensors).status().code(),
              absl::StatusCode::kInvalidArgument)
        << tensors[0].name;
  }
  EXPECT_EQ(SafetensorsWriter::Create(Path("w"), {}, {{"k", "\xff"}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Files().empty());
}

struct HostileFile {
  const char* name;
  std::string bytes;
  const char* message;  // what the error has to say
};

std::string TwoTensors(const char* first, const char* second) {
  return std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + first +
         R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
}

std::vector<HostileFile> HostileFiles() {
  const std::string good = OneTensor("F32", "[1]", "[0,4]");
  std::string ones = "[1";
  for (int size = 1; size < 65; ++size) ones += ",1";
  ones += ']';
  return {
      {"empty", "", "too few"},
      {"seven bytes", "\1\2\3\4\5\6\7", "too few"},
      {"length of all ones", RawFile(~uint64_t{0}, good), "the format allows"},
      {"length whose end overflows", RawFile(~uint64_t{0} - 7, good), "the format allows"},
      {"length negative if signed", RawFile(uint64_t{1} << 63, good), "the format allows"},
      {"length over 100 MB", RawFile(100'000'001, good), "the format allows"},
      {"length behind the file", RawFile(good.size() + 5, good + "1234"), "truncated"},
      {"length zero", RawFile(0, good), "does not start with '{'"},
      {"header cut", RawFile(good.size() - 1, good + "1234"), "JSON"},
      {"blank before the header", RawFile(" " + good, 4), "does not start with '{'"},
      {"array", RawFile("[1]", 0), "does not start with '{'"},
      {"text behind the header", RawFile(good + "x", 4), "JSON"},
      {"invalid UTF-8", RawFile("{\"\xff\":{}}", 0), "JSON"},
      {"NUL in the header", RawFile(std::string("{\0}", 3), 0), "JSON"},
      {"deep nesting", RawFile("{\"t\":" + std::string(1'000'000, '['), 0), "unexpected an array"},
      {"nested objects", RawFile(R"({"t":{"dtype":{}}})", 0), "unexpected an object"},
      {"tensor is null", RawFile(R"({"t":null})", 0), "unexpected null"},
      {"no dtype", RawFile(R"({"t":{"shape":[1],"data_offsets":[0,4]}})", 4), "no dtype"},
      {"no shape", RawFile(R"({"t":{"dtype":"F32","data_offsets":[0,4]}})", 4), "no shape"},
      {"no offsets", RawFile(R"({"t":{"dtype":"F32","shape":[1]}})", 4), "no data_offsets"},
      {"dtype a number", RawFile(R"({"t":{"dtype":7}})", 4), "unexpected a number"},
      {"shape a string", RawFile(R"({"t":{"dtype":"F32","shape":"1"}})", 4), "unexpected a string"},
      {"negative size", RawFile(OneTensor("F32", "[-1]", "[0,4]"), 4), "negative"},
      {"unknown dtype behind the data", RawFile(OneTensor("F33", "[1]", "[0,8]"), 4), "truncated"},
      {"unknown dtype and a gap", RawFile(OneTensor("F33", "[1]", "[1,5]"), 5), "gap"},
      {"unknown key without an end", RawFile(R"({"t":{"stride":[[1],{"a":)", 4), "JSON"},
      {"an entry behind an unknown key", RawFile(R"({"t":{"stride":{"dtype":"F32"},"dtype":7}})", 4),
       "unexpected a number"},
      {"nothing but an unknown key", RawFile(R"({"t":{"stride":[1]}})", 4), "no dtype"},
      {"fractional size", RawFile(OneTensor("F32", "[1.0]", "[0,4]"), 4), "1.0"},
      {"size above int64", RawFile(OneTensor("F32", "[9223372036854775808]", "[0,4]"), 4),
       "9223372036854775808"},
      {"size above uint64", RawFile(OneTensor("F32", "[18446744073709551617]", "[0,4]"), 4),
       "1844674407370955161"},
      {"product overflows to 4", RawFile(OneTensor("F32", "[4611686018427387905,4]", "[0,4]"), 4),
       "overflows"},
      {"product overflows, then zero", RawFile(OneTensor("F32", "[4611686018427387905,4,0]", "[0,0]"), 0),
       "overflows"},
      {"rank 65", RawFile(OneTensor("F32", ones.c_str(), "[0,4]"), 4), "unexpected a number"},
      {"half a byte", RawFile(OneTensor("F4", "[3]", "[0,1]"), 1), "whole bytes"},
      {"offsets behind the data", RawFile(OneTensor("F32", "[2]", "[0,8]"), 4), "truncated"},
      {"offsets far behind", RawFile(OneTensor("F32", "[1]", "[9223372036854775800,9223372036854775804]"), 4),
       "truncated"},
      {"offsets reversed", RawFile(OneTensor("F32", "[1]", "[4,0]"), 4), "claims bytes 4 to 0"},
      {"one offset", RawFile(OneTensor("F32", "[1]", "[0]"), 4), "not 2"},
      {"three offsets", RawFile(OneTensor("F32", "[1]", "[0,4,8]"), 4), "unexpected a number"},
      {"shape smaller than the bytes", RawFile(OneTensor("F16", "[1]", "[0,4]"), 4), "need 2"},
      {"shape larger than the bytes", RawFile(OneTensor("F32", "[2]", "[0,4]"), 4), "need 8"},
      {"overlap", RawFile(TwoTensors("[0,4]", "[2,6]"), 6), "overlap"},
      {"same bytes twice", RawFile(TwoTensors("[0,4]", "[0,4]"), 4), "overlap"},
      {"gap", RawFile(TwoTensors("[0,4]", "[5,9]"), 9), "gap"},
      {"gap at the start", RawFile(OneTensor("F32", "[1]", "[1,5]"), 5), "gap"},
      {"bytes behind the last tensor", RawFile(good, 5), "cover 4 bytes; the file holds 5"},
      {"no tensors, but data", RawFile("{}", 1), "cover 0 bytes"},
      {"same name twice",
       RawFile(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
               R"("t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
               2),
       "'t' occurs twice"},
      {"same name twice, escaped",
       RawFile(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
               R"("\u0074":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
               2),
       "'t' occurs twice"},
      {"dtype twice", RawFile(R"({"t":{"dtype":"U8","dtype":"F32"}})", 0), "'dtype' occurs twice"},
      {"metadata twice", RawFile(R"({"__metadata__":{},"__metadata__":{}})", 0), "occurs twice"},
      {"metadata not text", RawFile(R"({"__metadata__":{"a":1}})", 0), "unexpected a number"},
      {"metadata nested", RawFile(R"({"__metadata__":{"a":{}}})", 0), "unexpected an object"},
      {"metadata a string", RawFile(R"({"__metadata__":"a"})", 0), "unexpected a string"},
  };
}

TEST_F(SafetensorsTest, HostileFilesAreRefusedWithTheReason) {
  for (const HostileFile& hostile : HostileFiles()) {
    SCOPED_TRACE(hostile.name);
    WriteRaw("hostile", hostile.bytes);
    auto file = SafetensorsFile::Open(Path("hostile"));
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << file.status();
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(hostile.message));
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(Path("hostile")));
  }
}

TEST_F(SafetensorsTest, EveryTruncationAndEveryFlippedHeaderByteIsSurvived) {
  const std::string whole = RawFile(TwoTensors("[0,4]", "[4,8]"), 8);
  for (size_t size = 0; size < whole.size(); ++size) {
    WriteRaw("cut", whole.substr(0, size));
    EXPECT_FALSE(SafetensorsFile::Open(Path("cut")).ok()) << size;
  }
  for (size_t at = 0; at < whole.size() - 8; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      WriteRaw("flipped", flipped);
      auto file = SafetensorsFile::Open(Path("flipped"));
      if (!file.ok()) continue;
      for (const SafetensorsEntry& entry : file->entries()) EXPECT_LE(entry.end, 8) << at << " " << bit;
    }
  }
}

// A server must outlive whoever copies a file over one that it loads.
TEST_F(SafetensorsTest, AFileThatIsShortenedIsDataLossToAReader) {
  WriteRaw("a", RawFile(R"({"t":{"dtype":"F32","shape":[4096],"data_offsets":[0,16384]}})", 16384));
  auto file = SafetensorsFile::Open(Path("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  auto view = file->Find("t");
  ASSERT_TRUE(view.ok()) << view.status();
  std::vector<std::byte> bytes(16);
  ASSERT_TRUE(file->Read(*view, 16368, bytes).ok());
  EXPECT_EQ(bytes[15], std::byte{1});
  fs::resize_file(Path("a"), 8192);
  EXPECT_TRUE(file->Read(*view, 0, bytes).ok());
  const absl::Status status = file->Read(*view, 16368, bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("shortened"));
}

TEST_F(SafetensorsTest, PaddingMetadataForeignDtypesAndForeignKeysAreAccepted) {
  WriteRaw(
      "a",
      RawFile(R"({"__metadata__":{"format":"pt"},"ids":{"dtype":"I64","shape":[1],"data_offsets":[2,10]},)"
              R"("new":{"dtype":"F8_E4M3FNUZ","shape":[3],"data_offsets":[10,13]},)"
              R"("h":{"data_offsets":[0,2],"stride":[[-1,2.5],{"dtype":"F32","x":null}],"quantized":false,)"
              R"("shape":[1,1],"stride":"twice","dtype":"BF16"}}     )",
              13));
  auto file = SafetensorsFile::Open(Path("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Find("h")->dtype, SafetensorsType::kBFloat16);
  EXPECT_EQ(file->Find("ids").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(file->Find("ids").status().message()), HasSubstr("I64"));
  EXPECT_EQ(file->Find("new").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(file->Find("new").status().message()), HasSubstr("'new' of '" + Path("a")));
  EXPECT_THAT(std::string(file->Find("new").status().message()), HasSubstr("F8_E4M3FNUZ"));
  auto missing = file->Find("lm_head.weight").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("it has h, ids, new"));
  WriteRaw("nothing", RawFile("{}", 0));
  EXPECT_TRUE(SafetensorsFile::Open(Path("nothing")).ok());
}

TEST_F(SafetensorsTest, MissingFilesAndDevicesAreErrors) {
  EXPECT_EQ(SafetensorsFile::Open(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(directory_).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(SafetensorsFile::Open(Path("fifo")).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::safetensors_test
