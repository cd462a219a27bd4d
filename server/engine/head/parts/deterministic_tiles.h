// Where the rows of a deterministic session go on their way into its dW: into tiles of a fixed number of
// tokens, at places that the client gives, so that what is added in which order depends on the tokens alone.
//
// A place is claimed when its chunk is taken, and filled when the chunk was answered. A tile whose places are
// all filled is handed out once those before it were, in pieces: a piece is one product, of rows that have
// everything but themselves in common, whose lists hold no more tokens than a chunk's and whose hidden states
// are no larger than those of one. Absent and ignored rows are as if they were not there.
//
// Not thread-safe: Head guards it with its mutex.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_DETERMINISTIC_TILES_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_DETERMINISTIC_TILES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/memory/memory_budget.h"

namespace lossd::engine {

class Head;

class DeterministicTiles {
  struct Stored;

 public:
  // Tokens of a tile: the same number on every device, and small enough for a chunk of them to be within the
  // limits in any type.
  static int64_t TileTokens(const ChunkLimits& limits, int64_t hidden_size);
  // Memory for chunks that are claimed or filled and not yet in dW, but for what WidenFor is about.
  static int64_t KeptBytes(const ChunkLimits& limits, int64_t hidden_size);

  DeterministicTiles(const ChunkLimits& limits, int64_t hidden_size);

  enum class Room {
    kFree,
    kTaken,  // a token of this window has the place
    kLater,  // no memory now, but for chunks that are under way
    kNone,   // no memory, and nothing is under way: only chunks of earlier places make room
  };
  Room RoomFor(const Chunk& chunk) const;
  // Memory that a chunk takes here.
  struct Bytes {
    int64_t rows = 0;
    int64_t lists = 0;
  };
  static Bytes BytesOf(const Chunk& chunk);
  // Takes the places of a chunk that RoomFor found free. `bytes`, below, is the value that BytesOf has for
  // the chunk now.
  void Claim(const Chunk& chunk);
  // Frees the places of a claimed chunk that was not started, or was rejected.
  void GiveUp(int64_t place, int64_t tokens, const Bytes& bytes);
  // What has to be reserved beyond KeptBytes, and beyond what was before, for a chunk that has a teacher or
  // lists; and that it is. Comes before Claim, with nothing between the two. A teacher's rows are all as wide
  // as the first, so that there is room for a whole tile of them at once. Lists are of any length: there is
  // room for as many as there have been at one time.
  int64_t MissingFor(const Chunk& chunk) const;
  void WidenFor(const Chunk& chunk);

  // Puts a chunk that was claimed and answered into its tiles. `kind`: the kind of the product in which its
  // rows go to dW. `teacher`: the head that `kind.teacher` speaks of.
  void Fill(Chunk chunk, const BatchKey& kind, const Bytes& bytes, std::weak_ptr<Head> teacher = {});

  // One product: a chunk of rows, and the chunks they come from, whose memory Done frees.
  struct Piece {
    BatchKey kind;
    Chunk chunk;
    std::vector<std::shared_ptr<Stored>> rows;  // whose they are
    std::weak_ptr<Head> teacher;                // as of Fill
  };
  // Takes the tiles that are complete, in order.
  std::vector<Piece> TakeComplete();
  // Takes everything that is filled, before the window or the use of these weights ends. Rows that come into
  // the same tiles later make pieces of their own.
  std::vector<Piece> TakeAll();
  // The same for the tiles that hold rows with a teacher, the head with this number if one is given.
  std::vector<Piece> TakeTaught(std::optional<uint64_t> by);
  // Whether there are chunks or pieces under way, which make room when they are done.
  bool MakesRoom() const { return claimed_ > 0 || handed_out_ > 0; }
  // A piece is in dW. How many chunks are now that were not.
  int64_t Done(const Piece& piece);
  // Whether everything that was filled is in dW.
  bool AllAdded() const { return segments_.empty() && handed_out_ == 0; }

  // Whether no token has a place in this window.
  bool empty() const { return taken_.empty(); }

  // To be called once everything is (AllAdded).
  void BeginWindow();

  // The part of a window that is not in dW yet: for checkpoints.
  struct Content {
    int64_t tile_tokens = 0;
    int64_t next_tile = 0;
    std::map<int64_t, int64_t> taken;   // places
    std::map<int64_t, int64_t> filled;  // tokens, by tile
    std::vector<Chunk> kept = {};       // in order of places, each in one tile
    int64_t list_bytes = 0;             // of the lists of all of these
  };
  // No piece is under way, and no row has a teacher (TakeTaught). `claimed`: tokens by place of the chunks
  // that are claimed and not filled; they are left out.
  Content content(const std::map<int64_t, int64_t>& claimed) const;
  // FAILED_PRECONDITION if tiles have another size here, and the window is not empty.
  absl::Status CheckContent(const Content& content) const;
  // What has to be reserved for such a content beyond KeptBytes.
  static int64_t MissingFor(const Content& content);
  // Called on a new object, with a content that was checked. `kind_of`: as in Fill.
  void Restore(Content content, const std::function<BatchKey(const Chunk&)>& kind_of);

 private:
  // Rows of one chunk in one tile.
  struct Segment {
    std::shared_ptr<Stored> rows;
    int64_t tokens = 0;
    ChunkLists lists;  // of these rows: their chunk has none any more
  };
  using Segments = std::map<int64_t, Segment>;  // by the place they begin at
  void Take(int64_t tile, std::vector<Piece>* pieces);
  int64_t PieceTokens(const Chunk& chunk) const;
  // An empty piece for what the segment begins.
  Piece Begin(Segments::const_iterator it) const;
  // Has the segment end where the lists of the piece that it is to go into would be too long. False if not
  // one row of it fits.
  bool CutToFit(Segments::iterator it, const Piece& piece);
  // The segment that begins at `place`: its inputs by token, and its rows of one of its chunk's payloads.
  static void Append(int64_t place, const Segment& segment, Piece* piece);
  static void AppendRows(int64_t place, const Segment& segment, const Payload& rows,
                         std::vector<ByteSpan>* parts);
  void Release(const Bytes& bytes);
  int64_t TileOf(int64_t place) const { return place / tile_tokens_; }
  static void Untake(int64_t place, int64_t tokens, std::map<int64_t, int64_t>* taken);

  const int64_t tile_tokens_;
  int64_t most_bytes_;                // of rows in all
  const int64_t most_far_bytes_;      // that others may have than those of the first incomplete tile
  const int64_t most_piece_bytes_;    // of the hidden states of a product
  std::map<int64_t, int64_t> taken_;  // ends by beginnings, of places; no two touch
  Segments segments_;
  std::map<int64_t, int64_t> filled_;  // tokens by tile, from next_ on
  int64_t next_ = 0;                   // the first tile that is not complete
  int64_t teacher_row_bytes_ = 0;      // that there is room for
  int64_t list_bytes_ = 0;             // that there is room for
  Bytes kept_;
  int64_t claimed_ = 0;     // chunks
  int64_t handed_out_ = 0;  // pieces that are not done
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_DETERMINISTIC_TILES_H_
