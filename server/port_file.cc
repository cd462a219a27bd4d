#include "server/port_file.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace lossd {
namespace {

absl::Status CannotWrite(const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("cannot write --port_file ", path, "; it must be a regular file in a writable folder"));
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

absl::Status WritePortFile(const std::string& path, const Ports& ports) {
  if (path.empty()) return absl::OkStatus();
  // Once more: it may have come while the heads were restored.
  if (absl::Status can = CheckPortFile(path); !can.ok()) return can;
  const std::string temporary = absl::StrCat(path, ".tmp", getpid());
  std::ofstream file(temporary);
  file << nlohmann::json{{"grpc", ports.grpc}, {"metrics", ports.metrics}, {"health", ports.health}} << "\n";
  file.close();
  if (file && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  unlink(temporary.c_str());
  return CannotWrite(path);
}

}  // namespace lossd
