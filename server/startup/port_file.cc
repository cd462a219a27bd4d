#include "server/startup/port_file.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd {
namespace {

absl::Status CannotWrite(const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("cannot write --port_file ", path,
                   "; it must be a regular file in a writable folder, and the disk must have room for it"));
}

}  // namespace

absl::Status CheckPortFile(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) return CannotWrite(path);
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  const bool writable = access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) == 0;
  return writable ? absl::OkStatus() : CannotWrite(path);
}

absl::StatusOr<PortFile> PortFile::Write(const std::string& path, const Ports& ports) {
  if (path.empty()) return PortFile("", "");
  // Once more: it may have come while the heads were restored.
  if (absl::Status can = CheckPortFile(path); !can.ok()) return can;
  PortFile written(path, absl::StrCat(path, ".tmp", getpid()));
  std::ofstream file(written.written_);
  file << nlohmann::json{{"grpc", ports.grpc}, {"metrics", ports.metrics}, {"health", ports.health}} << "\n";
  file.close();
  if (!file) return CannotWrite(path);
  return written;
}

PortFile::PortFile(PortFile&& other) noexcept
    : path_(std::move(other.path_)), written_(std::exchange(other.written_, {})) {}

PortFile::~PortFile() {
  if (!written_.empty()) unlink(written_.c_str());
}

absl::Status PortFile::Publish() {
  if (written_.empty()) return absl::OkStatus();
  if (absl::Status can = CheckPortFile(path_); !can.ok()) return can;
  if (std::rename(written_.c_str(), path_.c_str()) != 0) return CannotWrite(path_);
  written_.clear();
  return absl::OkStatus();
}

}  // namespace lossd
