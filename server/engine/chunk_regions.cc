#include "server/engine/chunk_regions.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

constexpr char kHidden[] = "hidden_states_region";
constexpr char kDx[] = "dx_region";

absl::Status Invalid(absl::string_view field, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kRegion, field, message);
}

// Bytes of a region.
struct Range {
  std::shared_ptr<const Region> region;
  int64_t offset = 0;
  int64_t bytes = 0;

  std::byte* data() const { return region->memory().data() + offset; }
  bool Overlaps(const Range& other) const {
    return region == other.region && offset < other.offset + other.bytes && other.offset < offset + bytes;
  }
};

absl::StatusOr<Range> Resolve(const TensorRef& ref, int64_t bytes, absl::string_view field,
                              const RegionTable& regions) {
  absl::StatusOr<std::shared_ptr<const Region>> region = regions.Find(ref.handle, field);
  if (!region.ok()) return region.status();
  const int64_t size = (*region)->size();
  if (ref.offset < 0 || ref.offset % kRegionAlignment != 0) {
    return Invalid(field, absl::StrCat("offset of ", field, " is ", ref.offset, "; it must be a multiple of ",
                                       kRegionAlignment, ", at least 0"));
  }
  if (bytes > size || ref.offset > size - bytes) {
    return Invalid(field, absl::StrCat(bytes, " bytes from offset ", ref.offset, " of ", field,
                                       " on do not fit its region of ", size, " bytes"));
  }
  return Range{*std::move(region), ref.offset, bytes};
}

absl::Status CheckUse(const Chunk& chunk) {
  if (chunk.hidden_region.has_value() && chunk.hidden_states.size() > 0) {
    return Invalid(kHidden, absl::StrCat("hidden_states holds ", chunk.hidden_states.size(),
                                         " bytes and hidden_states_region is set; only one of them may be"));
  }
  if (chunk.dx_region.has_value() && chunk.mode == ComputeMode::kLossOnly) {
    return Invalid(kDx, "dx_region is set, but mode is COMPUTE_MODE_LOSS_ONLY, which has no dX");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ResolveRegions(Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits,
                            const RegionTable& regions) {
  if (!chunk.decode_status.ok()) return chunk.decode_status;
  if (!chunk.hidden_region.has_value() && !chunk.dx_region.has_value()) return absl::OkStatus();
  if (absl::Status status = ValidateTokens(chunk, head, limits); !status.ok()) return status;
  if (absl::Status status = CheckUse(chunk); !status.ok()) return status;
  const int64_t elements = chunk.tokens * head.hidden_size;  // small, ValidateTokens says
  Range hidden;
  Range dx;
  if (chunk.hidden_region.has_value()) {
    absl::StatusOr<Range> range =
        Resolve(*chunk.hidden_region, elements * kernels::SizeOf(chunk.hidden_type), kHidden, regions);
    if (!range.ok()) return range.status();
    hidden = *std::move(range);
  }
  if (chunk.dx_region.has_value()) {
    absl::StatusOr<Range> range =
        Resolve(*chunk.dx_region, elements * kernels::SizeOf(chunk.dx_type), kDx, regions);
    if (!range.ok()) return range.status();
    dx = *std::move(range);
  }
  if (hidden.region != nullptr && dx.region != nullptr && dx.Overlaps(hidden)) {
    return Invalid(kDx,
                   absl::StrCat("dX [", dx.offset, ", ", dx.offset + dx.bytes, ") overlaps hidden states [",
                                hidden.offset, ", ", hidden.offset + hidden.bytes,
                                ") of the same region; a chunk that is sent again needs them"));
  }
  if (hidden.region != nullptr) {
    const ByteSpan bytes(hidden.data(), static_cast<size_t>(hidden.bytes));
    chunk.hidden_states = Payload::In(bytes, hidden.region->memory().place(), hidden.region);
    chunk.hidden_region.reset();
  }
  if (dx.region != nullptr) {
    chunk.dx = {dx.data(), dx.region->memory().place(), dx.region};
    chunk.dx_region.reset();
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
