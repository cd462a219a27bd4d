// A temporary folder for checkpoints, and what lies in it.
#ifndef LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FOLDER_H_
#define LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FOLDER_H_

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace lossd::engine {

class CheckpointFolder {
 public:
  CheckpointFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "lossd-checkpoint-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~CheckpointFolder() { std::filesystem::remove_all(path_); }
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  void Clear() const {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      std::filesystem::remove_all(entry.path());
    }
  }

  std::string path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const {
    return std::filesystem::path(path_) / name;
  }

  // Regular files by their paths in it, and their content.
  std::map<std::string, std::string> Files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      if (!entry.is_regular_file()) continue;
      files[std::filesystem::relative(entry.path(), path_).string()] = Read(entry.path());
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
  std::string path_;
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_CHECKPOINT_CHECKPOINT_FOLDER_H_
