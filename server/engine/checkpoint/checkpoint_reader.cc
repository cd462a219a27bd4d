#include "server/engine/checkpoint/checkpoint_reader.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/worker_pool.h"

namespace lossd::engine {
namespace {

constexpr int64_t kReadBytes = int64_t{4} << 20;
constexpr int kFilesAtOnce = 4;

struct FreeHash {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

// Makes room for the lists of a chunk whose offsets were read, of which the file has `left` bytes for this
// one and those behind it: no more than that, whatever the offsets say. The rest is ValidateKept's.
absl::Status SizeLists(int64_t left, Chunk* chunk) {
  if (chunk->lists.use == ChunkLists::Use::kNone) return absl::OkStatus();
  int64_t listed = 0;
  std::memcpy(&listed, chunk->lists.offsets.data() + chunk->lists.offsets.size() - sizeof(listed),
              sizeof(listed));
  const int64_t width = chunk->lists.use == ChunkLists::Use::kTargets ? 8 : 4;
  const auto offsets = static_cast<int64_t>(chunk->lists.offsets.size());
  if (listed < 0 || listed > kMostListedTokens || offsets + listed * width > left) {
    return absl::InvalidArgumentError(absl::StrCat("lists of ", listed, " tokens are not there"));
  }
  chunk->lists.tokens.resize(static_cast<size_t>(listed) * sizeof(int32_t));
  if (width == 8) chunk->lists.probabilities.resize(chunk->lists.tokens.size());
  return absl::OkStatus();
}

}  // namespace

std::string CheckpointReader::Path(const std::string& name) const { return absl::StrCat(folder_, "/", name); }

absl::Status CheckpointReader::Open(const std::string& name) {
  const std::string path = Path(name);
  absl::StatusOr<FileDescriptor> opened = files_->OpenFile(path);
  if (absl::IsNotFound(opened.status())) return Damaged(path, "it is missing");
  if (!opened.ok()) return opened.status();
  open_.insert_or_assign(name, *std::move(opened));
  return absl::OkStatus();
}

absl::Status CheckpointReader::VerifyFile(const std::string& name, const CheckpointFile& expected) const {
  const std::string path = Path(name);
  const FileDescriptor& file = open_.at(name);
  const absl::StatusOr<FileIdentity> identity = files_->Identify(file, path);
  if (!identity.ok()) return identity.status();
  if (identity->bytes != expected.bytes) {
    return Damaged(path, absl::StrCat("it has ", identity->bytes, " bytes, not ", expected.bytes));
  }
  const std::unique_ptr<XXH3_state_t, FreeHash> hash(XXH3_createState());
  XXH3_64bits_reset(hash.get());
  std::vector<std::byte> piece(static_cast<size_t>(std::min(kReadBytes, expected.bytes)));
  for (int64_t offset = 0; offset < expected.bytes; offset += kReadBytes) {
    const std::span<std::byte> bytes =
        std::span(piece).first(static_cast<size_t>(std::min(kReadBytes, expected.bytes - offset)));
    if (absl::Status read = DurableFiles::Read(file, path, offset, bytes); !read.ok()) return read;
    XXH3_64bits_update(hash.get(), bytes.data(), bytes.size());
  }
  if (XXH3_64bits_digest(hash.get()) == expected.checksum) return absl::OkStatus();
  return Damaged(path, "its checksum is another one");
}

// Weights, master and moments are of one size, and one processor takes longer for a checksum than most disks,
// or the page cache, for the bytes.
absl::Status CheckpointReader::VerifyFiles() {
  for (const auto& [name, file] : manifest_.files) {
    if (absl::Status opened = Open(name); !opened.ok()) return opened;
  }
  std::deque<absl::Status> verified;
  {
    WorkerPool pool(kFilesAtOnce);
    for (const auto& [name, file] : manifest_.files) {
      absl::Status& status = verified.emplace_back();
      pool.Run([this, &name = name, &file = file, &status] { status = VerifyFile(name, file); });
    }
  }
  for (const absl::Status& status : verified) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::Verify() {
  if (absl::Status verified = VerifyFiles(); !verified.ok()) return verified;
  if (manifest_.class_weights) {
    if (absl::Status loaded = LoadClassWeights(); !loaded.ok()) return loaded;
  }
  for (SessionCheckpoint& session : manifest_.head.sessions) {
    if (!session.tiles.has_value()) continue;
    absl::Status loaded = LoadTiles(session.session.number, &*session.tiles);
    if (!loaded.ok()) return loaded;
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::Read(const std::string& name, int64_t offset, std::span<std::byte> out) const {
  return DurableFiles::Read(open_.at(name), Path(name), offset, out);
}

absl::Status CheckpointReader::LoadClassWeights() {
  HeadConfig& config = manifest_.head.config;
  auto weights = std::make_shared<std::vector<float>>(static_cast<size_t>(config.vocab_size));
  absl::Status read = Read(kClassWeightsFile, 0, std::as_writable_bytes(std::span(*weights)));
  if (!read.ok()) return read;
  config.class_weights = std::move(weights);
  const absl::Status valid = Validate(config);
  return valid.ok() ? valid : Damaged(Path(kClassWeightsFile), valid.message());
}

absl::Status CheckpointReader::LoadTiles(uint64_t session_number, DeterministicTiles::Content* tiles) const {
  const std::string name = TilesFile(session_number);
  int64_t offset = 0;
  absl::Status status;
  const auto load = [&](char* data, size_t bytes) {
    if (status.ok()) status = Read(name, offset, std::as_writable_bytes(std::span(data, bytes)));
    offset += static_cast<int64_t>(bytes);
  };
  int64_t list_bytes = tiles->list_bytes;
  for (Chunk& chunk : tiles->kept) {
    for (std::string* values : {&chunk.labels, &chunk.token_weights, &chunk.lse_gradients,
                                &chunk.entropy_gradients, &chunk.lists.offsets}) {
      load(values->data(), values->size());
    }
    if (!status.ok()) return status;
    if (absl::Status sized = SizeLists(list_bytes, &chunk); !sized.ok()) {
      return Damaged(Path(name), sized.message());
    }
    list_bytes -= chunk.lists.bytes();
    load(chunk.lists.tokens.data(), chunk.lists.tokens.size());
    load(chunk.lists.probabilities.data(), chunk.lists.probabilities.size());
    std::string rows(static_cast<size_t>(chunk.tokens * manifest_.head.config.hidden_size *
                                         kernels::SizeOf(chunk.hidden_type)),
                     '\0');
    load(rows.data(), rows.size());
    chunk.hidden_states = Payload::Of(std::move(rows));
    if (!status.ok()) return status;
    if (absl::Status valid = ValidateKept(chunk, manifest_.head.config); !valid.ok()) {
      return Damaged(Path(name), valid.message());
    }
    SortTargets(chunk);
  }
  if (list_bytes != 0) return Damaged(Path(name), absl::StrCat("it has ", list_bytes, " bytes of no list"));
  return status;
}

}  // namespace lossd::engine
