#include "server/engine/checkpoint/checkpoint_store.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/checkpoint/checkpoint_json.h"
#include "server/engine/checkpoint/checkpoint_manifest.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

using nlohmann::json;

constexpr char kHeads[] = "heads";
constexpr char kDrainFile[] = "drain.json";
constexpr char kConsumedFile[] = "drain.consumed.json";
constexpr char kDeletedFile[] = ".deleted";
constexpr char kRestoresFile[] = ".restores";
constexpr char kTemporaryBegin[] = ".tmp-";
constexpr char kOldBegin[] = ".old-";
constexpr int64_t kMostManifest = int64_t{256} << 20;
// More versions than a server that was killed can have published after its last checkpoint: no number that it
// gave to weights which are lost is given to others.
constexpr uint64_t kVersionsOfTheLost = uint64_t{1} << 20;

std::string FolderOf(const std::string& head) { return absl::StrCat(kHeads, "/", head); }
std::string FolderOf(const std::string& head, const std::string& tag) {
  return absl::StrCat(kHeads, "/", head, "/", tag);
}

absl::Status NotThere(const std::string& head, const std::string& tag) {
  return MakeError(
      absl::StatusCode::kNotFound, RejectReason::kCheckpoint, tag.empty() ? "head" : "tag",
      absl::StrCat("head '", head, "' has no checkpoint", tag.empty() ? "" : absl::StrCat(" '", tag, "'"),
                   " (ListCheckpoints shows those there are)"));
}

// The prefix of a tag PREFIX-NUMBER; nothing for other tags.
std::optional<std::string> PrefixOf(const std::string& tag) {
  const size_t hyphen = tag.find_last_not_of("0123456789");
  const bool numbered =
      hyphen != std::string::npos && hyphen > 0 && tag[hyphen] == '-' && hyphen + 1 < tag.size();
  return numbered && IsName(tag) ? std::optional(tag.substr(0, hyphen)) : std::nullopt;
}

absl::Status CheckNames(const std::string& head, const std::string& tag) {
  const auto refuse = [](absl::string_view field) {
    return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, field,
                     absl::StrCat(field,
                                  " must be 1 to 128 characters of [A-Za-z0-9._-] and start with a "
                                  "letter or a digit"));
  };
  if (!IsName(head)) return refuse("head");
  return IsName(tag) || tag == kDrainTag ? absl::OkStatus() : refuse("tag");
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(const std::string& folder,
                                                                       DurableFiles::Fault fault) {
  absl::StatusOr<DurableFiles> files = DurableFiles::Open(folder, std::move(fault));
  if (!files.ok()) return files.status();
  std::unique_ptr<CheckpointStore> store(new CheckpointStore(*std::move(files)));
  if (absl::Status tidy = store->TidyUp(); !tidy.ok()) return tidy;
  const absl::StatusOr<std::vector<CheckpointInfo>> all = store->List("");
  if (!all.ok()) return all.status();
  for (const CheckpointInfo& info : *all) {
    store->last_saved_at_ = std::max(store->last_saved_at_, info.saved_at);
  }
  return store;
}

absl::Status CheckpointStore::TidyUp() {
  const absl::StatusOr<std::vector<std::string>> heads = Heads();
  if (!heads.ok()) return heads.status();
  for (const std::string& head : *heads) {
    if (absl::Status tidy = TidyUpHead(head); !tidy.ok()) return tidy;
  }
  return absl::OkStatus();
}

absl::Status CheckpointStore::TidyUpHead(const std::string& head) {
  const absl::StatusOr<std::vector<std::string>> entries = files_.List(FolderOf(head));
  if (!entries.ok()) return entries.status();
  for (const std::string& entry : *entries) {
    const std::string path = FolderOf(head, entry);
    absl::Status status;
    if (absl::StartsWith(entry, kOldBegin)) {
      // The crash was between the two names of DurableFiles::Replace, or behind them.
      const std::string replaced = FolderOf(head, entry.substr(sizeof(kOldBegin) - 1));
      const absl::StatusOr<bool> there = files_.Exists(replaced);
      if (!there.ok()) return there.status();
      status = *there ? files_.Remove(path) : files_.Rename(path, replaced);
    } else if (absl::StartsWith(entry, kTemporaryBegin)) {
      status = files_.Remove(path);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> CheckpointStore::Heads() const {
  absl::StatusOr<std::vector<std::string>> heads = files_.List(kHeads);
  if (absl::IsNotFound(heads.status())) return std::vector<std::string>();
  if (heads.ok()) std::erase_if(*heads, [](const std::string& name) { return !IsName(name); });
  return heads;
}

absl::StatusOr<std::vector<std::string>> CheckpointStore::LiveHeads() const {
  absl::StatusOr<std::vector<std::string>> heads = Heads();
  if (!heads.ok()) return heads;
  std::vector<std::string> live;
  for (std::string& head : *heads) {
    const absl::StatusOr<bool> deleted = files_.Exists(FolderOf(head, kDeletedFile));
    if (!deleted.ok()) return deleted.status();
    if (!*deleted) live.push_back(std::move(head));
  }
  return live;
}

absl::Status CheckpointStore::MarkDeleted(const std::string& head) const {
  const absl::StatusOr<bool> there = files_.Exists(FolderOf(head));
  if (!there.ok() || !*there) return there.status();
  return files_.WriteFile(FolderOf(head, kDeletedFile), "");
}

absl::Status CheckpointStore::MarkLive(const std::string& head) const {
  const std::string path = FolderOf(head, kDeletedFile);
  const absl::StatusOr<bool> there = files_.Exists(path);
  if (!there.ok() || !*there) return there.status();
  if (absl::Status removed = files_.Remove(path); !removed.ok()) return removed;
  return files_.SyncFolder(FolderOf(head));
}

absl::StatusOr<std::vector<std::string>> CheckpointStore::Tags(const std::string& head) const {
  absl::StatusOr<std::vector<std::string>> tags = files_.List(FolderOf(head));
  if (absl::IsNotFound(tags.status())) return std::vector<std::string>();
  if (tags.ok()) {
    std::erase_if(*tags, [](const std::string& tag) { return !IsName(tag) && tag != kDrainTag; });
  }
  return tags;
}

absl::StatusOr<Manifest> CheckpointStore::ReadManifest(const std::string& head,
                                                       const std::string& tag) const {
  const std::string path = absl::StrCat(FolderOf(head, tag), "/", kManifestFile);
  const absl::StatusOr<std::string> text = files_.ReadFile(path, kMostManifest);
  if (absl::IsNotFound(text.status())) return NotThere(head, tag);
  if (!text.ok()) return text.status();
  absl::StatusOr<Manifest> manifest = ParseManifest(*text, path);
  if (!manifest.ok() || manifest->head.config.name == head) return manifest;
  return MakeError(absl::StatusCode::kDataLoss, RejectReason::kCheckpoint, "",
                   absl::StrCat("'", path, "' of --checkpoint_dir is of head ", manifest->head.config.name));
}

absl::StatusOr<std::unique_ptr<CheckpointWriter>> CheckpointStore::Begin(const std::string& head,
                                                                         const std::string& tag) {
  if (absl::Status names = CheckNames(head, tag); !names.ok()) return names;
  std::unique_ptr<CheckpointWriter> writer(new CheckpointWriter(&files_, &known_, head, tag));
  if (absl::Status begun = writer->Begin(); !begun.ok()) return begun;
  return writer;
}

absl::StatusOr<CheckpointInfo> CheckpointStore::Commit(CheckpointWriter& writer, HeadCheckpoint head) {
  head.saved_at = std::max(absl::ToUnixMicros(absl::Now()), last_saved_at_ + 1);
  last_saved_at_ = head.saved_at;
  Manifest manifest;
  if (head.config.class_weights != nullptr) {
    manifest.class_weights = true;
    const std::vector<float>& weights = *head.config.class_weights;
    const absl::Status added =
        writer.Add(kClassWeightsFile, "config", [&weights](const CheckpointWriter::Append& append) {
          return append(std::as_bytes(std::span(weights)));
        });
    if (!added.ok()) return added;
  }
  manifest.head = std::move(head);
  for (const auto& [name, file] : writer.written_) manifest.files.emplace(name, file.file);
  const absl::StatusOr<std::string> text = ToText(manifest);
  if (!text.ok()) return text.status();
  if (absl::Status finished = writer.Finish(*text, &known_); !finished.ok()) return finished;
  // Comes last: a save that fails must not make a deleted head live again.
  if (absl::Status live = MarkLive(writer.head()); !live.ok()) return live;
  return InfoOf(manifest, writer.tag());
}

absl::StatusOr<CheckpointReader> CheckpointStore::Find(const std::string& head, const std::string& tag) {
  if (absl::Status names = CheckNames(head, tag.empty() ? kDrainTag : tag); !names.ok()) return names;
  std::vector<std::string> tags = {tag};
  if (tag.empty()) {
    absl::StatusOr<std::vector<std::string>> all = Tags(head);
    if (!all.ok()) return all.status();
    tags = *std::move(all);
  }
  std::optional<std::pair<std::string, Manifest>> newest;
  for (const std::string& one : tags) {
    // A damaged one might be the newest: better to say so than to go back further than anybody expects.
    absl::StatusOr<Manifest> manifest = ReadManifest(head, one);
    if (!manifest.ok()) return manifest.status();
    if (newest.has_value() && newest->second.head.saved_at > manifest->head.saved_at) continue;
    newest.emplace(one, *std::move(manifest));
  }
  if (!newest.has_value()) return NotThere(head, tag);
  return CheckpointReader(&files_, FolderOf(head, newest->first), newest->first, std::move(newest->second));
}

absl::StatusOr<std::vector<CheckpointInfo>> CheckpointStore::List(const std::string& head) const {
  if (!head.empty() && !IsName(head)) return CheckNames(head, kDrainTag);
  absl::StatusOr<std::vector<std::string>> heads = std::vector<std::string>{head};
  if (head.empty()) heads = Heads();
  if (!heads.ok()) return heads.status();
  std::vector<CheckpointInfo> all;
  for (const std::string& name : *heads) {
    const absl::StatusOr<std::vector<std::string>> tags = Tags(name);
    if (!tags.ok()) return tags.status();
    for (const std::string& tag : *tags) {
      const absl::StatusOr<Manifest> manifest = ReadManifest(name, tag);
      if (manifest.ok()) all.push_back(InfoOf(*manifest, tag));
    }
  }
  std::sort(all.begin(), all.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.saved_at > b.saved_at; });
  return all;
}

absl::StatusOr<DeletedCheckpoint> CheckpointStore::Delete(const std::string& head, const std::string& tag) {
  if (absl::Status names = CheckNames(head, tag == kDrainTag ? "" : tag); !names.ok()) return names;
  const std::string path = FolderOf(head, tag);
  const absl::StatusOr<bool> there = files_.Exists(path);
  if (!there.ok()) return there.status();
  if (!*there) return NotThere(head, tag);
  DeletedCheckpoint deleted;
  if (const absl::StatusOr<Manifest> manifest = ReadManifest(head, tag); manifest.ok()) {
    deleted.info = InfoOf(*manifest, tag);
  } else {
    deleted.info.head = head;
    deleted.info.tag = tag;
  }
  if (const absl::StatusOr<FolderBytes> bytes = files_.Measure(path); bytes.ok()) {
    deleted.bytes_freed = bytes->alone;
  }
  // Nobody looks under this name, and the next start removes what a crash leaves of it.
  const std::string temporary = FolderOf(head, absl::StrCat(kTemporaryBegin, tag));
  if (absl::Status cleared = files_.Remove(temporary); !cleared.ok()) return cleared;
  if (absl::Status hidden = files_.Rename(path, temporary); !hidden.ok()) return hidden;
  // The checkpoint is deleted now, even if its files cannot be removed.
  if (!files_.Remove(temporary).ok()) deleted.bytes_freed = 0;
  return deleted;
}

absl::StatusOr<std::vector<std::string>> CheckpointStore::BeyondNewest(const std::string& head,
                                                                       const std::string& tag,
                                                                       int64_t keep) const {
  const std::optional<std::string> prefix = PrefixOf(tag);
  if (!prefix.has_value()) return std::vector<std::string>();
  const absl::StatusOr<std::vector<std::string>> tags = Tags(head);
  if (!tags.ok()) return tags.status();
  std::vector<std::pair<int64_t, std::string>> row;  // by when they were saved
  for (const std::string& other : *tags) {
    if (PrefixOf(other) != prefix) continue;
    if (const absl::StatusOr<Manifest> manifest = ReadManifest(head, other); manifest.ok()) {
      row.emplace_back(manifest->head.saved_at, other);
    }
  }
  std::sort(row.rbegin(), row.rend());
  std::vector<std::string> beyond;
  for (size_t i = static_cast<size_t>(keep); i < row.size(); ++i) beyond.push_back(row[i].second);
  return beyond;
}

void CheckpointStore::Remember(const CheckpointReader& reader, const std::string& file,
                               const std::string& key) {
  const std::string path = reader.Path(file);
  const absl::StatusOr<FileIdentity> identity = files_.Identify(reader.open_.at(file), path);
  if (!identity.ok()) return;
  known_.insert_or_assign(std::pair(reader.checkpoint().config.name, file),
                          KnownFile{key, path, *identity, reader.manifest_.files.at(file)});
}

// Restores

absl::StatusOr<RestoreNumbers> CheckpointStore::NextRestore(const std::string& head,
                                                            const RestoreNumbers& saved,
                                                            const RestoreNumbers& now) const {
  const absl::StatusOr<RestoreNumbers> last = LastRestore(head);
  if (!last.ok()) return last.status();
  RestoreNumbers next{std::max({last->restores, saved.restores, now.restores}) + 1, last->weight_version};
  if (saved.weight_version > 0) {
    const uint64_t known = std::max(last->weight_version, saved.weight_version);
    // A head that is there knows what came after these.
    next.weight_version = now.weight_version >= known ? now.weight_version + 1 : known + kVersionsOfTheLost;
  }
  const absl::StatusOr<std::string> text =
      Sealed({{"format", 1}, {"restores", next.restores}, {"weight_version", next.weight_version}});
  if (!text.ok()) return text.status();
  if (absl::Status made = files_.WriteFile(FolderOf(head, kRestoresFile), *text); !made.ok()) return made;
  return next;
}

// Zeros if there was none.
absl::StatusOr<RestoreNumbers> CheckpointStore::LastRestore(const std::string& head) const {
  const std::string path = FolderOf(head, kRestoresFile);
  const absl::StatusOr<std::string> text = files_.ReadFile(path, kMostManifest);
  if (absl::IsNotFound(text.status())) return RestoreNumbers{};
  if (!text.ok()) return text.status();
  const absl::StatusOr<json> content = Unsealed(*text, path);
  if (!content.ok()) return content.status();
  try {
    if (content->at("format") == 1) {
      const auto number = [&content](const char* name) {
        return static_cast<uint64_t>(ToCount(content->at(name)));
      };
      return RestoreNumbers{number("restores"), number("weight_version")};
    }
  } catch (const json::exception&) {  // said below
  } catch (const std::invalid_argument&) {
  }
  return MakeError(absl::StatusCode::kDataLoss, RejectReason::kCheckpoint, "",
                   absl::StrCat("'", path,
                                "' of --checkpoint_dir says nothing that this lossd understands: without it "
                                "a version of weights may come twice"));
}

// Drains

absl::Status CheckpointStore::WriteDrain(const DrainRecord& record) {
  const absl::StatusOr<std::string> text = Sealed({{"format", 1},
                                                   {"incarnation", record.incarnation},
                                                   {"heads", record.heads},
                                                   {"parked", record.parked}});
  if (!text.ok()) return text.status();
  // The record of an earlier drain must not be taken for this one when it is given back.
  if (absl::Status removed = files_.Remove(kConsumedFile); !removed.ok()) return removed;
  return files_.WriteFile(kDrainFile, *text);
}

absl::StatusOr<std::optional<DrainRecord>> CheckpointStore::ReadDrain() const {
  const absl::StatusOr<std::string> text = files_.ReadFile(kDrainFile, kMostManifest);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  if (!text.ok()) return text.status();
  const absl::StatusOr<json> content = Unsealed(*text, kDrainFile);
  if (!content.ok()) return content.status();
  try {
    DrainRecord record;
    record.incarnation = content->at("incarnation").get<std::string>();
    record.heads = content->at("heads").get<std::map<std::string, int64_t>>();
    record.parked = content->at("parked").get<std::set<std::string>>();
    if (content->at("format") == 1 && !record.incarnation.empty()) return record;
  } catch (const json::exception&) {  // said below
  }
  return MakeError(absl::StatusCode::kDataLoss, RejectReason::kCheckpoint, "",
                   absl::StrCat("'", kDrainFile,
                                "' of --checkpoint_dir says nothing that this lossd understands: "
                                "remove it to start from the newest checkpoints"));
}

absl::Status CheckpointStore::ConsumeDrain() { return files_.Rename(kDrainFile, kConsumedFile); }

absl::Status CheckpointStore::ReturnDrain() {
  const absl::StatusOr<bool> there = files_.Exists(kDrainFile);
  if (!there.ok()) return there.status();
  return *there ? absl::OkStatus() : files_.Rename(kConsumedFile, kDrainFile);
}

}  // namespace lossd::engine
