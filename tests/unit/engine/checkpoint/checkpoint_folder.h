// A temporary folder for checkpoints, and what lies in it.
#ifndef LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FOLDER_H_
#define LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FOLDER_H_

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "tests/support/scratch_folder.h"

namespace lossd::engine {

class CheckpointFolder {
 public:
  void Clear() const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      std::filesystem::remove_all(entry.path());
    }
  }

  std::string path() const { return folder_.path(); }
  std::filesystem::path operator/(const std::string& name) const { return folder_.path() / name; }

  // Regular files by their paths in it, and their content.
  std::map<std::string, std::string> Files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.path())) {
      if (!entry.is_regular_file()) continue;
      files[std::filesystem::relative(entry.path(), folder_.path()).string()] = Read(entry.path());
    }
    return files;
  }
  static std::string Read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void Write(const std::filesystem::path& path, const std::string& content) {
    std::ofstream(path, std::ios::binary) << content;
  }

 private:
  lossd::testing::ScratchFolder folder_;
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FOLDER_H_
