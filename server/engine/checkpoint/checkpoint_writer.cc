#include "server/engine/checkpoint/checkpoint_writer.h"

#include <xxhash.h>

#include <memory>

#include "absl/strings/str_cat.h"

namespace lossd::engine {
namespace {

struct FreeFileHash {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

}  // namespace

CheckpointWriter::CheckpointWriter(const DurableFiles* files, const KnownFiles* known, std::string head,
                                   std::string tag)
    : files_(files),
      known_(known),
      head_(std::move(head)),
      tag_(std::move(tag)),
      folder_(absl::StrCat("heads/", head_, "/", tag_)),
      temporary_(absl::StrCat("heads/", head_, "/.tmp-", tag_)) {}

CheckpointWriter::~CheckpointWriter() {
  if (!temporary_.empty()) files_->Remove(temporary_).IgnoreError();
}

absl::Status CheckpointWriter::Begin() {
  absl::Status status = files_->MakeFolder("heads");
  if (status.ok()) status = files_->MakeFolder(absl::StrCat("heads/", head_));
  if (status.ok()) status = files_->Remove(temporary_);
  if (status.ok()) status = files_->MakeFolder(temporary_);
  return status;
}

bool CheckpointWriter::Share(const std::string& name, const std::string& key) {
  const auto known = known_->find({head_, name});
  if (key.empty() || known == known_->end() || known->second.key != key) return false;
  const KnownFile& file = known->second;
  // One that is gone, or on a file system without links, is written once more.
  const std::string path = absl::StrCat(temporary_, "/", name);
  if (!files_->Link(file.path, file.identity, path).ok()) return false;
  written_.insert_or_assign(name, File{FileDescriptor(), key, file.file});
  return true;
}

absl::Status CheckpointWriter::Add(const std::string& name, const std::string& key,
                                   absl::FunctionRef<absl::Status(const Append& append)> fill) {
  if (Share(name, key)) return absl::OkStatus();
  const std::string path = absl::StrCat(temporary_, "/", name);
  absl::StatusOr<FileDescriptor> opened = files_->Create(path);
  if (!opened.ok()) return opened.status();
  File& entry = written_.insert_or_assign(name, File{*std::move(opened), key, {}}).first->second;
  const std::unique_ptr<XXH3_state_t, FreeFileHash> hash(XXH3_createState());
  XXH3_64bits_reset(hash.get());
  absl::Status filled = fill([&](std::span<const std::byte> bytes) {
    XXH3_64bits_update(hash.get(), bytes.data(), bytes.size());
    entry.file.bytes += static_cast<int64_t>(bytes.size());
    return files_->Write(entry.descriptor, path, bytes);
  });
  if (!filled.ok()) return filled;
  entry.file.checksum = XXH3_64bits_digest(hash.get());
  bytes_written_ += entry.file.bytes;
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Finish(const std::string& manifest, KnownFiles* known) {
  absl::Status status = Add(kManifestFile, "", [&manifest](const Append& append) {
    return append(std::as_bytes(std::span(manifest)));
  });
  for (const auto& [name, file] : written_) {
    if (!status.ok()) return status;
    if (file.descriptor.number() < 0) continue;
    status = files_->Sync(file.descriptor, absl::StrCat(temporary_, "/", name));
  }
  if (status.ok()) status = files_->SyncFolder(temporary_);
  if (status.ok()) status = files_->Replace(temporary_, folder_);
  if (!status.ok()) return status;
  temporary_.clear();
  for (const auto& [name, file] : written_) {
    const std::string path = absl::StrCat(folder_, "/", name);
    const auto place = std::pair(head_, name);
    if (file.descriptor.number() < 0) {
      known->at(place).path = path;  // the newest of its names: others may be replaced
      continue;
    }
    known->erase(place);
    const absl::StatusOr<FileIdentity> identity = files_->Identify(file.descriptor, path);
    if (identity.ok() && !file.key.empty()) {
      known->insert_or_assign(place, KnownFile{file.key, path, *identity, file.file});
    }
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
