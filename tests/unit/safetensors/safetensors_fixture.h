// A folder for safetensors files, and files made of bytes that no writer would write.
#ifndef LOSSD_TESTS_UNIT_SAFETENSORS_SAFETENSORS_FIXTURE_H_
#define LOSSD_TESTS_UNIT_SAFETENSORS_SAFETENSORS_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace lossd::testing {

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = std::filesystem::temp_directory_path() / "safetensors_test.XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ / name; }
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  void WriteRaw(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
  }

  std::filesystem::path directory_;
};

// A file of this header and this many bytes of data; the length is the header's unless given.
inline std::string RawFile(const std::string& header, size_t data_bytes) {
  uint64_t size = header.size();
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));
  return bytes + header + std::string(data_bytes, '\1');
}
inline std::string RawFile(uint64_t claimed, const std::string& rest) {
  std::string bytes(sizeof(claimed), '\0');
  std::memcpy(bytes.data(), &claimed, sizeof(claimed));
  return bytes + rest;
}

// One tensor "t" of 4 bytes with this dtype, shape and offsets.
inline std::string OneTensor(const char* dtype, const char* shape, const char* offsets) {
  return std::string(R"({"t":{"dtype":")") + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
         offsets + "}}";
}

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_UNIT_SAFETENSORS_SAFETENSORS_FIXTURE_H_
