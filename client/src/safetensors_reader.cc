#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/safetensors.h"
#include "nlohmann/json.hpp"

namespace lossd {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";

absl::Status ErrnoStatus(const std::string& path) {
  return absl::Status(absl::ErrnoToStatusCode(errno),
                      absl::StrCat("cannot open '", path, "': ", std::strerror(errno)));
}

absl::Status Malformed(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("'", path, "' is not a valid safetensors file: ", why));
}

std::optional<DataType> ToDataType(absl::string_view dtype) {
  if (dtype == "F32") return DataType::kFloat32;
  if (dtype == "BF16") return DataType::kBFloat16;
  if (dtype == "F16") return DataType::kFloat16;
  return std::nullopt;
}

// "lm_head.weight, model.norm.weight and 12 more".
template <typename Range, typename NameOf>
std::string SomeNames(const Range& range, NameOf name_of) {
  constexpr size_t kShown = 5;
  std::string text;
  size_t shown = 0;
  for (const auto& item : range) {
    if (shown == kShown) return absl::StrCat(text, " and ", range.size() - kShown, " more");
    absl::StrAppend(&text, shown++ == 0 ? "" : ", ", name_of(item));
  }
  return text.empty() ? "nothing" : text;
}

absl::StatusOr<std::span<const std::byte>> Map(const std::string& path) {
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not hang us
  if (fd < 0) return ErrnoStatus(path);
  struct stat info {};
  absl::Status status;
  void* address = MAP_FAILED;
  if (fstat(fd, &info) != 0) {
    status = ErrnoStatus(path);
  } else if (!S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrCat("'", path, "' is not a regular file"));
  } else if (info.st_size < static_cast<off_t>(sizeof(uint64_t))) {
    status = Malformed(path, absl::StrCat("it has ", info.st_size, " bytes, too few for a header length"));
  } else {
    address = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (address == MAP_FAILED) status = ErrnoStatus(path);
  }
  close(fd);
  if (!status.ok()) return status;
  return std::span(static_cast<const std::byte*>(address), static_cast<size_t>(info.st_size));
}

// True for a relative path that, read as text, stays below the directory it starts from.
bool StaysInside(const std::string& name) {
  std::filesystem::path path(name);
  if (name.empty() || name.find('\0') != std::string::npos || path.is_absolute()) return false;
  return std::none_of(path.begin(), path.end(),
                      [](const std::filesystem::path& part) { return part == ".."; });
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  auto mapping = Map(path);
  if (!mapping.ok()) return mapping.status();
  SafetensorsFile file;
  file.path_ = path;
  file.mapping_ = *mapping;

  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, mapping->data(), sizeof(header_bytes));
  const auto rest = mapping->subspan(sizeof(header_bytes));
  if (header_bytes > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return Malformed(path, absl::StrCat("its header claims ", header_bytes, " bytes; the format allows ",
                                        kMaxSafetensorsHeaderBytes));
  }
  if (header_bytes > rest.size()) {
    return Malformed(path, absl::StrCat("its header claims ", header_bytes, " bytes; the file has ",
                                        rest.size(), " behind the length (truncated?)"));
  }
  file.data_ = rest.subspan(header_bytes);
  auto header = ParseSafetensorsHeader({reinterpret_cast<const char*>(rest.data()), header_bytes},
                                       static_cast<int64_t>(file.data_.size()));
  if (!header.ok()) return Malformed(path, header.status().message());
  file.header_ = *std::move(header);
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (!mapping_.empty()) munmap(const_cast<std::byte*>(mapping_.data()), mapping_.size());
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept { *this = std::move(other); }

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(mapping_, other.mapping_);
  std::swap(data_, other.data_);
  std::swap(header_, other.header_);
  return *this;
}

absl::StatusOr<SafetensorsView> SafetensorsFile::Find(absl::string_view name) const {
  auto entry = std::find_if(header_.tensors.begin(), header_.tensors.end(),
                            [&](const SafetensorsEntry& candidate) { return candidate.name == name; });
  if (entry == header_.tensors.end()) {
    return absl::NotFoundError(
        absl::StrCat("'", path_, "' has no tensor '", name, "'; it has ",
                     SomeNames(header_.tensors, [](const SafetensorsEntry& tensor) { return tensor.name; })));
  }
  std::optional<DataType> dtype = ToDataType(entry->dtype);
  if (!dtype) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' of '", path_, "' has dtype ",
                                                   entry->dtype, "; lossd reads F32, BF16 and F16"));
  }
  return SafetensorsView{.dtype = *dtype,
                         .shape = entry->shape,
                         .data = data_.subspan(static_cast<size_t>(entry->begin),
                                               static_cast<size_t>(entry->end - entry->begin))};
}

absl::StatusOr<SafetensorsModel> SafetensorsModel::Open(const std::string& path) {
  SafetensorsModel model;
  model.path_ = path;
  std::error_code ignored;
  std::string file_path = path;
  if (std::filesystem::is_directory(path, ignored)) {
    const std::filesystem::path directory(path);
    if (std::filesystem::exists(directory / kIndexName, ignored)) {
      if (absl::Status status = model.ReadIndex(directory / kIndexName); !status.ok()) return status;
      return model;
    }
    file_path = directory / kSingleName;
    if (!std::filesystem::exists(file_path, ignored)) {
      return absl::NotFoundError(
          absl::StrCat("the directory '", path, "' has neither ", kIndexName, " nor ", kSingleName));
    }
  }
  auto file = SafetensorsFile::Open(file_path);
  if (!file.ok()) return file.status();
  for (const SafetensorsEntry& entry : file->entries()) model.shard_of_[entry.name] = file_path;
  model.files_.emplace(file_path, *std::move(file));
  return model;
}

absl::Status SafetensorsModel::ReadIndex(const std::string& index_path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(index_path, error);
  std::ifstream stream(index_path, std::ios::binary);
  if (error || !stream) return absl::PermissionDeniedError(absl::StrCat("cannot read '", index_path, "'"));
  if (bytes > static_cast<uintmax_t>(kMaxSafetensorsHeaderBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("'", index_path, "' has ", bytes, " bytes, more than the ",
                                                   kMaxSafetensorsHeaderBytes, " allowed"));
  }
  const auto json = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (json.is_discarded() || map == json.end() || !map->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", index_path, "' is not JSON with an object 'weight_map'"));
  }
  for (const auto& [name, shard] : map->items()) {
    if (!shard.is_string() || !StaysInside(shard.get_ref<const std::string&>())) {
      return absl::InvalidArgumentError(absl::StrCat("'", index_path, "' maps tensor '", name, "' to ",
                                                     shard.dump().substr(0, 200),
                                                     ", which is not a file inside the directory"));
    }
    shard_of_[name] = std::filesystem::path(path_) / shard.get_ref<const std::string&>();
  }
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsView> SafetensorsModel::Find(const std::string& name) {
  auto shard = shard_of_.find(name);
  if (shard == shard_of_.end()) {
    return absl::NotFoundError(
        absl::StrCat("'", path_, "' has no tensor '", name, "'; it has ",
                     SomeNames(shard_of_, [](const auto& item) { return item.first; })));
  }
  auto file = files_.find(shard->second);
  if (file == files_.end()) {
    auto opened = SafetensorsFile::Open(shard->second);
    if (!opened.ok()) return opened.status();
    file = files_.emplace(shard->second, *std::move(opened)).first;
  }
  return file->second.Find(name);
}

}  // namespace lossd
