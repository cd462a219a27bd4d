#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/safetensors/index.h"
#include "proto/safetensors/safetensors.h"

namespace lossd {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kIndexEnd[] = ".index.json";
constexpr char kSingleName[] = "model.safetensors";

absl::Status Malformed(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("'", path, "' is not a valid safetensors file: ", why));
}

std::optional<SafetensorsType> ToType(absl::string_view dtype) {
  for (const auto type : {SafetensorsType::kFloat32, SafetensorsType::kBFloat16, SafetensorsType::kFloat16}) {
    if (dtype == Name(type)) return type;
  }
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

// The header behind its length, read rather than mapped: see SafetensorsFile.
absl::StatusOr<std::string> ReadHeader(const InputFile& file) {
  uint64_t bytes = 0;
  const auto rest = static_cast<uint64_t>(file.size()) - sizeof(bytes);
  if (absl::Status status = file.Read(0, std::as_writable_bytes(std::span(&bytes, 1))); !status.ok()) {
    return status;
  }
  if (bytes > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return Malformed(file.path(), absl::StrCat("its header claims ", bytes, " bytes; the format allows ",
                                               kMaxSafetensorsHeaderBytes));
  }
  if (bytes > rest) {
    return Malformed(file.path(), absl::StrCat("its header claims ", bytes, " bytes; the file has ", rest,
                                               " behind the length (truncated?)"));
  }
  std::string header(bytes, '\0');
  absl::Status status = file.Read(sizeof(bytes), std::as_writable_bytes(std::span(header)));
  if (!status.ok()) return status;
  return header;
}

}  // namespace

int64_t SizeOf(SafetensorsType type) { return type == SafetensorsType::kFloat32 ? 4 : 2; }

const char* Name(SafetensorsType type) {
  switch (type) {
    case SafetensorsType::kFloat32:
      return "F32";
    case SafetensorsType::kBFloat16:
      return "BF16";
    case SafetensorsType::kFloat16:
      return "F16";
  }
  return "";
}

// Files

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  auto file = InputFile::Open("", path);
  if (!file.ok()) return file.status();
  return Open(*std::move(file));
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(InputFile file) {
  const std::string path = file.path();
  if (file.is_directory()) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is not a regular file"));
  }
  if (file.size() < static_cast<int64_t>(sizeof(uint64_t))) {
    return Malformed(path, absl::StrCat("it has ", file.size(), " bytes, too few for a header length"));
  }
  SafetensorsFile result(std::move(file));
  const auto size = static_cast<size_t>(result.file_.size());
  const absl::StatusOr<std::string> json = ReadHeader(result.file_);
  if (!json.ok()) return json.status();
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, result.file_.descriptor(), 0);
  if (address == MAP_FAILED) {
    return absl::Status(absl::ErrnoToStatusCode(errno),
                        absl::StrCat("cannot map '", path, "': ", std::strerror(errno)));
  }
  result.mapping_ = std::span(static_cast<const std::byte*>(address), size);
  result.data_ = result.mapping_.subspan(sizeof(uint64_t) + json->size());
  auto header = ParseSafetensorsHeader(*json, static_cast<int64_t>(result.data_.size()));
  if (!header.ok()) return Malformed(path, header.status().message());
  result.header_ = *std::move(header);
  return result;
}

SafetensorsFile::~SafetensorsFile() {
  if (!mapping_.empty()) munmap(const_cast<std::byte*>(mapping_.data()), mapping_.size());
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : file_(std::move(other.file_)),
      mapping_(std::exchange(other.mapping_, {})),
      data_(std::exchange(other.data_, {})),
      header_(std::move(other.header_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(file_, other.file_);
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
        absl::StrCat("'", file_.path(), "' has no tensor '", name, "'; it has ",
                     SomeNames(header_.tensors, [](const SafetensorsEntry& tensor) { return tensor.name; })));
  }
  const std::optional<SafetensorsType> dtype = ToType(entry->dtype);
  if (!dtype) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' of '", file_.path(), "' has dtype ",
                                                   entry->dtype, "; lossd reads F32, BF16 and F16"));
  }
  return SafetensorsView{.dtype = *dtype,
                         .shape = entry->shape,
                         .data = data_.subspan(static_cast<size_t>(entry->begin),
                                               static_cast<size_t>(entry->end - entry->begin))};
}

bool SafetensorsFile::Holds(const SafetensorsView& view) const {
  return view.data.data() >= mapping_.data() && view.data.data() < mapping_.data() + mapping_.size();
}

absl::Status SafetensorsFile::Read(const SafetensorsView& view, int64_t offset,
                                   std::span<std::byte> out) const {
  return file_.Read(view.data.data() - mapping_.data() + offset, out);
}

// Models

absl::StatusOr<SafetensorsModel> SafetensorsModel::Open(const std::string& path) {
  SafetensorsModel model("", path);
  if (absl::Status status = model.Read(); !status.ok()) return status;
  return model;
}

absl::StatusOr<SafetensorsModel> SafetensorsModel::OpenBelow(const std::string& root,
                                                             const std::string& path) {
  SafetensorsModel model(root, path);
  if (absl::Status status = model.Read(); !status.ok()) return status;
  return model;
}

absl::Status SafetensorsModel::Read() {
  auto file = InputFile::Open(root_, path_);
  if (!file.ok()) return file.status();
  const std::filesystem::path directory(path_);
  if (!file->is_directory()) {
    if (!absl::EndsWith(path_, kIndexEnd)) return Take(*std::move(file));
    return ReadIndex(*file, directory.parent_path());
  }
  auto index = InputFile::Open(root_, directory / kIndexName);
  if (index.ok()) return ReadIndex(*index, directory);
  if (!absl::IsNotFound(index.status())) return index.status();
  auto single = InputFile::Open(root_, directory / kSingleName);
  if (single.ok()) return Take(*std::move(single));
  if (!absl::IsNotFound(single.status())) return single.status();
  return absl::NotFoundError(
      absl::StrCat("the directory '", path_, "' has neither ", kIndexName, " nor ", kSingleName));
}

absl::Status SafetensorsModel::Take(InputFile file) {
  const std::string path = file.path();
  auto opened = SafetensorsFile::Open(std::move(file));
  if (!opened.ok()) return opened.status();
  for (const SafetensorsEntry& entry : opened->entries()) shard_of_[entry.name] = path;
  files_.emplace(path, *std::move(opened));
  return absl::OkStatus();
}

absl::Status SafetensorsModel::ReadIndex(const InputFile& index, const std::string& directory) {
  if (index.is_directory()) {
    return absl::InvalidArgumentError(absl::StrCat("'", index.path(), "' is not a regular file"));
  }
  if (index.size() > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("'", index.path(), "' has ", index.size(),
                                                   " bytes, more than the ", kMaxSafetensorsHeaderBytes,
                                                   " allowed"));
  }
  std::string json(static_cast<size_t>(index.size()), '\0');
  absl::Status status = index.Read(0, std::as_writable_bytes(std::span(json)));
  if (!status.ok()) return status;
  const auto map = ParseSafetensorsIndex(json);
  if (!map.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("'", index.path(), "' ", map.status().message()));
  }
  for (const auto& [name, shard] : *map) {
    if (!StaysInside(shard)) {
      return absl::InvalidArgumentError(absl::StrCat("'", index.path(), "' maps tensor '", name, "' to '",
                                                     shard.substr(0, 200),
                                                     "', which is not a file inside the directory"));
    }
    shard_of_[name] = std::filesystem::path(directory) / shard;
  }
  return absl::OkStatus();
}

absl::StatusOr<const SafetensorsFile*> SafetensorsModel::Shard(const std::string& path) {
  auto file = files_.find(path);
  if (file == files_.end()) {
    auto input = InputFile::Open(root_, path);
    if (!input.ok()) return input.status();
    auto opened = SafetensorsFile::Open(*std::move(input));
    if (!opened.ok()) return opened.status();
    file = files_.emplace(path, *std::move(opened)).first;
  }
  return &file->second;
}

absl::StatusOr<SafetensorsView> SafetensorsModel::Find(const std::string& name) {
  const auto shard = shard_of_.find(name);
  if (shard == shard_of_.end()) {
    return absl::NotFoundError(
        absl::StrCat("'", path_, "' has no tensor '", name, "'; it has ",
                     SomeNames(shard_of_, [](const auto& item) { return item.first; })));
  }
  const auto file = Shard(shard->second);
  if (!file.ok()) return file.status();
  return (*file)->Find(name);
}

absl::Status SafetensorsModel::Read(const SafetensorsView& view, int64_t offset,
                                    std::span<std::byte> out) const {
  for (const auto& [path, file] : files_) {
    if (file.Holds(view)) return file.Read(view, offset, out);
  }
  return absl::InvalidArgumentError(absl::StrCat("the view is not one of '", path_, "'"));
}

absl::StatusOr<std::vector<std::string>> SafetensorsModel::FindByShape(const std::vector<int64_t>& shape) {
  std::set<std::string> paths;
  for (const auto& [name, path] : shard_of_) paths.insert(path);
  const auto fits = [](int64_t size, int64_t wanted) { return wanted == kAnySize || size == wanted; };
  std::vector<std::string> names;
  for (const std::string& path : paths) {
    const auto file = Shard(path);
    if (!file.ok()) return file.status();
    for (const SafetensorsEntry& entry : (*file)->entries()) {
      if (std::ranges::equal(entry.shape, shape, fits) && ToType(entry.dtype).has_value()) {
        names.push_back(entry.name);
      }
    }
  }
  return names;
}

}  // namespace lossd
