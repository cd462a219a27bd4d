// A folder of a test's own.
#ifndef LOSSD_TESTS_SUPPORT_SCRATCH_FOLDER_H_
#define LOSSD_TESTS_SUPPORT_SCRATCH_FOLDER_H_

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <system_error>

namespace lossd::testing {

// The destructor removes the folder with all its files.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "lossd-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      std::cerr << "there can be no folder " << name << "\n";
      std::abort();
    }
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_SCRATCH_FOLDER_H_
