#include "server/engine/head/parts/deterministic_tiles.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr int64_t kMostTileTokens = 4096;
constexpr int64_t kWidest = 4;        // bytes of an element of hidden states
constexpr int64_t kTokenBytes = 20;   // label, weight, gradients of the log-sum-exp and the entropy
constexpr int64_t kChunkBytes = 512;  // what a chunk takes beside its tensors
constexpr int64_t kFarChunks = 4;     // of the largest size, ahead of the first incomplete tile
constexpr int64_t kIgnored = -1;      // a label of a piece
// The same number of chunks, with the most tokens that lists hold and their probabilities.
constexpr int64_t kFarListBytes = kFarChunks * kMostListedTokens * 8;
// Room for lists is made in units of this, so that small chunks do not each reserve something.
constexpr int64_t kListUnit = int64_t{1} << 20;

int64_t LargestChunk(const ChunkLimits& limits) {
  return limits.max_chunk_bytes + limits.max_chunk_tokens * kTokenBytes + kChunkBytes;
}

// Most bytes of the chunks that have at least one token in the first incomplete tile.
int64_t NearBytes(const ChunkLimits& limits, int64_t hidden_size) {
  const int64_t tokens = DeterministicTiles::TileTokens(limits, hidden_size);
  return tokens * (hidden_size * kWidest + kTokenBytes + kChunkBytes) + 2 * LargestChunk(limits);
}

int64_t RoomForLists(int64_t bytes) { return (bytes + kListUnit - 1) / kListUnit * kListUnit; }

bool SameProduct(const DeterministicTiles::Piece& piece, const BatchKey& kind, const Chunk& chunk) {
  return piece.kind == kind && piece.chunk.gradient_scale == chunk.gradient_scale &&
         piece.chunk.options.z_gradient_scale == chunk.options.z_gradient_scale;
}

// Appends the values of `tokens` tokens from `first` on to `out`, which holds those of `rows` tokens. If only
// one of the two has values, those of the other are `value`.
void AppendFloats(const std::string& from, int64_t first, int64_t tokens, float value, int64_t rows,
                  std::string* out) {
  if (from.empty() && out->empty()) return;
  const auto fill = [value, out](int64_t count) {
    for (int64_t i = 0; i < count; ++i) out->append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  if (out->empty()) fill(rows);
  if (from.empty()) {
    fill(tokens);
  } else {
    out->append(from, static_cast<size_t>(first) * sizeof(float),
                static_cast<size_t>(tokens) * sizeof(float));
  }
}

void AppendLabels(const Chunk& from, int64_t first, int64_t tokens, std::string* out) {
  for (int64_t i = first; i < first + tokens; ++i) {
    int64_t label = 0;
    std::memcpy(&label, from.labels.data() + i * 8, sizeof(label));
    if (label == from.ignore_index) label = kIgnored;
    out->append(reinterpret_cast<const char*>(&label), sizeof(label));
  }
}

int64_t TeacherRowBytes(const Chunk& chunk) { return chunk.teacher_hidden.size() / chunk.tokens; }

void AppendParts(const Payload& payload, int64_t offset, int64_t bytes, std::vector<ByteSpan>* parts) {
  PayloadReader reader(payload);
  while (offset > 0) offset -= static_cast<int64_t>(reader.Next(offset).size());
  while (bytes > 0) {
    parts->push_back(reader.Next(bytes));
    bytes -= static_cast<int64_t>(parts->back().size());
  }
}

}  // namespace

struct DeterministicTiles::Stored {
  Chunk chunk;
  BatchKey kind;
  Bytes bytes;
  std::weak_ptr<Head> teacher;
  int64_t segments = 0;      // that are not in dW
  int64_t piece_tokens = 1;  // a piece of such rows ends at each multiple of so many places
};

int64_t DeterministicTiles::TileTokens(const ChunkLimits& limits, int64_t hidden_size) {
  const int64_t most =
      std::min({kMostTileTokens, limits.max_chunk_tokens, limits.max_chunk_bytes / (hidden_size * kWidest)});
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(most, 1))));
}

int64_t DeterministicTiles::KeptBytes(const ChunkLimits& limits, int64_t hidden_size) {
  return NearBytes(limits, hidden_size) + kFarChunks * LargestChunk(limits);
}

DeterministicTiles::DeterministicTiles(const ChunkLimits& limits, int64_t hidden_size)
    : tile_tokens_(TileTokens(limits, hidden_size)),
      most_bytes_(KeptBytes(limits, hidden_size)),
      most_far_bytes_(kFarChunks * LargestChunk(limits)),
      most_piece_bytes_(limits.max_chunk_bytes) {}

DeterministicTiles::Bytes DeterministicTiles::BytesOf(const Chunk& chunk) {
  const int64_t lists = chunk.lists.bytes();
  return {std::max(chunk.kept_bytes(), chunk.payload_bytes()) - lists + kChunkBytes, lists};
}

int64_t DeterministicTiles::MissingFor(const Chunk& chunk) const {
  // A chunk's limit is for both hidden states: only the rows of the first incomplete tile take more.
  const int64_t teacher = tile_tokens_ * std::max<int64_t>(0, TeacherRowBytes(chunk) - teacher_row_bytes_);
  const int64_t lists = RoomForLists(kept_.lists + BytesOf(chunk).lists) - list_bytes_;
  return teacher + std::max<int64_t>(0, lists);
}

void DeterministicTiles::WidenFor(const Chunk& chunk) {
  const int64_t row_bytes = std::max(teacher_row_bytes_, TeacherRowBytes(chunk));
  most_bytes_ += tile_tokens_ * (row_bytes - teacher_row_bytes_);
  teacher_row_bytes_ = row_bytes;
  list_bytes_ = std::max(list_bytes_, RoomForLists(kept_.lists + BytesOf(chunk).lists));
}

DeterministicTiles::Room DeterministicTiles::RoomFor(const Chunk& chunk) const {
  const int64_t place = *chunk.window_token;
  const auto next = taken_.lower_bound(place);
  if (next != taken_.end() && next->first < place + chunk.tokens) return Room::kTaken;
  if (next != taken_.begin() && std::prev(next)->second > place) return Room::kTaken;
  const bool near = TileOf(place) <= next_;
  const Bytes bytes = BytesOf(chunk);
  const bool rows_fit = bytes.rows <= (near ? most_bytes_ : most_far_bytes_) - kept_.rows;
  const bool lists_fit = near || bytes.lists == 0 || bytes.lists <= kFarListBytes - kept_.lists;
  if (rows_fit && lists_fit) return Room::kFree;
  if (MakesRoom()) return Room::kLater;
  // The reserve is large enough for all chunks with places in this tile.
  return near ? Room::kFree : Room::kNone;
}

void DeterministicTiles::Claim(const Chunk& chunk) {
  int64_t begin = *chunk.window_token;
  int64_t end = begin + chunk.tokens;
  auto next = taken_.upper_bound(begin);
  if (next != taken_.end() && next->first == end) {
    end = next->second;
    next = taken_.erase(next);
  }
  if (next != taken_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
  } else {
    taken_.emplace(begin, end);
  }
  const Bytes bytes = BytesOf(chunk);
  kept_.rows += bytes.rows;
  kept_.lists += bytes.lists;
  ++claimed_;
}

void DeterministicTiles::Untake(int64_t place, int64_t tokens, std::map<int64_t, int64_t>* taken) {
  const auto range = std::prev(taken->upper_bound(place));
  const auto [begin, end] = *range;
  taken->erase(range);
  if (begin < place) taken->emplace(begin, place);
  if (place + tokens < end) taken->emplace(place + tokens, end);
}

void DeterministicTiles::GiveUp(int64_t place, int64_t tokens, const Bytes& bytes) {
  Untake(place, tokens, &taken_);
  Release(bytes);
  --claimed_;
}

void DeterministicTiles::Release(const Bytes& bytes) {
  kept_.rows -= bytes.rows;
  kept_.lists -= bytes.lists;
}

void DeterministicTiles::Fill(Chunk chunk, const BatchKey& kind, const Bytes& bytes,
                              std::weak_ptr<Head> teacher) {
  DropIgnoredLists(chunk);
  ChunkLists lists = std::exchange(chunk.lists, {});
  int64_t place = *chunk.window_token;
  const int64_t begin = place;
  const int64_t end = place + chunk.tokens;
  auto stored = std::make_shared<Stored>(Stored{std::move(chunk), kind, bytes, std::move(teacher), 0});
  stored->piece_tokens = PieceTokens(stored->chunk);
  while (place < end) {
    const int64_t tokens = std::min(end, (place / stored->piece_tokens + 1) * stored->piece_tokens) - place;
    const bool whole = tokens == end - begin;
    segments_.emplace(
        place,
        Segment{stored, tokens, whole ? std::exchange(lists, {}) : SliceLists(lists, place - begin, tokens)});
    ++stored->segments;
    filled_[TileOf(place)] += tokens;
    place += tokens;
  }
  --claimed_;
}

// A product takes as much at once as a chunk may bring. Rows of a teacher may be so wide that those of a tile
// are more.
int64_t DeterministicTiles::PieceTokens(const Chunk& chunk) const {
  if (chunk.teacher_hidden.size() == 0) return tile_tokens_;
  const int64_t row_bytes = chunk.hidden_states.size() / chunk.tokens + TeacherRowBytes(chunk);
  const auto most = static_cast<uint64_t>(std::max<int64_t>(1, most_piece_bytes_ / row_bytes));
  return std::min(tile_tokens_, static_cast<int64_t>(std::bit_floor(most)));
}

void DeterministicTiles::Take(int64_t tile, std::vector<Piece>* pieces) {
  const size_t before = pieces->size();
  int64_t piece_end = 0;  // the first place that is too far for the last of them
  struct Parts {
    std::vector<ByteSpan> hidden_states;
    std::vector<ByteSpan> teacher_hidden;
  };
  std::vector<Parts> parts;
  auto it = segments_.lower_bound(tile * tile_tokens_);
  while (it != segments_.end() && TileOf(it->first) == tile) {
    const Segment& segment = it->second;
    const Stored& stored = *segment.rows;
    const bool same = pieces->size() > before && it->first < piece_end &&
                      SameProduct(pieces->back(), stored.kind, stored.chunk);
    if (!same || !CutToFit(it, pieces->back())) {
      pieces->push_back(Begin(it));
      parts.emplace_back();
      piece_end = (it->first / stored.piece_tokens + 1) * stored.piece_tokens;
      CutToFit(it, pieces->back());
    }
    Append(it->first, segment, &pieces->back());
    AppendRows(it->first, segment, stored.chunk.hidden_states, &parts.back().hidden_states);
    AppendRows(it->first, segment, stored.chunk.teacher_hidden, &parts.back().teacher_hidden);
    it = segments_.erase(it);
  }
  for (size_t i = before; i < pieces->size(); ++i) {
    Piece& piece = (*pieces)[i];
    auto owner = std::make_shared<std::vector<std::shared_ptr<Stored>>>(piece.rows);
    Parts& of_piece = parts[i - before];
    piece.chunk.hidden_states = Payload(std::move(of_piece.hidden_states), owner, /*kept_bytes=*/0);
    if (!of_piece.teacher_hidden.empty()) {
      piece.chunk.teacher_hidden = Payload(std::move(of_piece.teacher_hidden), owner, /*kept_bytes=*/0);
    }
    ++handed_out_;
  }
}

DeterministicTiles::Piece DeterministicTiles::Begin(Segments::const_iterator it) const {
  const Stored& first = *it->second.rows;
  Piece piece;
  piece.kind = first.kind;
  piece.teacher = first.teacher;
  piece.chunk.hidden_type = first.chunk.hidden_type;
  piece.chunk.mode = ComputeMode::kWeightGradientOnly;
  piece.chunk.ignore_index = kIgnored;
  piece.chunk.gradient_scale = first.chunk.gradient_scale;
  piece.chunk.options = first.chunk.options;
  // At once, so that lists take no more memory here than they did in their segments.
  int64_t listed = 0;
  for (const int64_t tile = TileOf(it->first); it != segments_.end() && TileOf(it->first) == tile; ++it) {
    const Stored& next = *it->second.rows;
    if (!SameProduct(piece, next.kind, next.chunk) || listed >= kMostListedTokens) break;
    listed += ListedTokens(it->second.lists);
  }
  ReserveLists(std::min(listed, kMostListedTokens), first.kind.lists.use, &piece.chunk.lists);
  return piece;
}

bool DeterministicTiles::CutToFit(Segments::iterator it, const Piece& piece) {
  Segment& segment = it->second;
  const int64_t rows =
      RowsWithin(segment.lists, segment.tokens, kMostListedTokens - ListedTokens(piece.chunk.lists));
  if (rows == 0 || rows == segment.tokens) return rows > 0;
  const int64_t rest = segment.tokens - rows;
  segments_.emplace(it->first + rows, Segment{segment.rows, rest, SliceLists(segment.lists, rows, rest)});
  ++segment.rows->segments;
  segment.lists = SliceLists(segment.lists, 0, rows);
  segment.tokens = rows;
  return true;
}

void DeterministicTiles::Append(int64_t place, const Segment& segment, Piece* piece) {
  const Chunk& from = segment.rows->chunk;
  const int64_t first = place - *from.window_token;
  AppendFloats(from.token_weights, first, segment.tokens, 1.0f, piece->chunk.tokens,
               &piece->chunk.token_weights);
  AppendFloats(from.lse_gradients, first, segment.tokens, 0.0f, piece->chunk.tokens,
               &piece->chunk.lse_gradients);
  AppendFloats(from.entropy_gradients, first, segment.tokens, 0.0f, piece->chunk.tokens,
               &piece->chunk.entropy_gradients);
  AppendLabels(from, first, segment.tokens, &piece->chunk.labels);
  AppendLists(segment.lists, &piece->chunk.lists);
  piece->chunk.tokens += segment.tokens;
  piece->rows.push_back(segment.rows);
}

void DeterministicTiles::AppendRows(int64_t place, const Segment& segment, const Payload& rows,
                                    std::vector<ByteSpan>* parts) {
  const Chunk& from = segment.rows->chunk;
  const int64_t row_bytes = rows.size() / from.tokens;
  AppendParts(rows, (place - *from.window_token) * row_bytes, segment.tokens * row_bytes, parts);
}

std::vector<DeterministicTiles::Piece> DeterministicTiles::TakeComplete() {
  std::vector<Piece> pieces;
  for (auto it = filled_.begin(); it != filled_.end() && it->first == next_ && it->second == tile_tokens_;
       it = filled_.erase(it)) {
    Take(next_++, &pieces);
  }
  return pieces;
}

std::vector<DeterministicTiles::Piece> DeterministicTiles::TakeAll() {
  std::vector<Piece> pieces;
  while (!segments_.empty()) Take(TileOf(segments_.begin()->first), &pieces);
  return pieces;
}

std::vector<DeterministicTiles::Piece> DeterministicTiles::TakeTaught(std::optional<uint64_t> by) {
  std::set<int64_t> tiles;
  for (const auto& [place, segment] : segments_) {
    const TeacherKind& teacher = segment.rows->kind.teacher;
    if (teacher.backend != nullptr && by.value_or(teacher.head_number) == teacher.head_number) {
      tiles.insert(TileOf(place));
    }
  }
  std::vector<Piece> pieces;
  for (const int64_t tile : tiles) Take(tile, &pieces);
  return pieces;
}

int64_t DeterministicTiles::Done(const Piece& piece) {
  --handed_out_;
  int64_t chunks = 0;
  for (const std::shared_ptr<Stored>& stored : piece.rows) {
    if (--stored->segments > 0) continue;
    Release(stored->bytes);
    ++chunks;
  }
  return chunks;
}

void DeterministicTiles::BeginWindow() {
  taken_.clear();
  filled_.clear();
  next_ = 0;
}

DeterministicTiles::Content DeterministicTiles::content(const std::map<int64_t, int64_t>& claimed) const {
  Content content{.tile_tokens = tile_tokens_, .next_tile = next_, .taken = taken_, .filled = filled_};
  for (const auto& [place, tokens] : claimed) Untake(place, tokens, &content.taken);
  for (const auto& [place, segment] : segments_) {
    const Chunk& from = segment.rows->chunk;
    const auto first = static_cast<size_t>(place - *from.window_token);
    const auto tokens = static_cast<size_t>(segment.tokens);
    const auto slice = [first, tokens](const std::string& values, size_t size) {
      return values.empty() ? values : values.substr(first * size, tokens * size);
    };
    Chunk& chunk = content.kept.emplace_back();
    chunk.window_token = place;
    chunk.tokens = segment.tokens;
    chunk.hidden_type = from.hidden_type;
    chunk.ignore_index = from.ignore_index;
    chunk.gradient_scale = from.gradient_scale;
    chunk.options = from.options;
    chunk.labels = slice(from.labels, sizeof(int64_t));
    chunk.token_weights = slice(from.token_weights, sizeof(float));
    chunk.lse_gradients = slice(from.lse_gradients, sizeof(float));
    chunk.entropy_gradients = slice(from.entropy_gradients, sizeof(float));
    chunk.lists = segment.lists;
    content.list_bytes += chunk.lists.bytes();
    std::vector<ByteSpan> parts;
    AppendRows(place, segment, from.hidden_states, &parts);
    chunk.hidden_states = Payload(std::move(parts), segment.rows, /*kept_bytes=*/0);
  }
  return content;
}

absl::Status DeterministicTiles::CheckContent(const Content& content) const {
  if (content.tile_tokens == tile_tokens_ || content.taken.empty()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, RejectReason::kCheckpoint, "",
      absl::StrCat("the window of a deterministic session was added up in tiles of ", content.tile_tokens,
                   " tokens, and would be in tiles of ", tile_tokens_,
                   " here: start the server with the --max_chunk_bytes and --max_chunk_tokens it had"));
}

int64_t DeterministicTiles::MissingFor(const Content& content) { return RoomForLists(content.list_bytes); }

void DeterministicTiles::Restore(Content content, const std::function<BatchKey(const Chunk&)>& kind_of) {
  if (content.taken.empty()) return;
  taken_ = std::move(content.taken);
  next_ = content.next_tile;
  for (Chunk& chunk : content.kept) {
    const BatchKey kind = kind_of(chunk);
    const Bytes bytes = BytesOf(chunk);
    kept_.rows += bytes.rows;
    kept_.lists += bytes.lists;
    ++claimed_;
    Fill(std::move(chunk), kind, bytes);
  }
  list_bytes_ = RoomForLists(kept_.lists);
  filled_ = std::move(content.filled);  // with what was filled and is in dW
}

}  // namespace lossd::engine
