#include "server/engine/regions/chunk_regions.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr char kHidden[] = "hidden_states_region";
constexpr char kTeacherHidden[] = "options.distillation.hidden_states_region";
constexpr char kDx[] = "dx_region";

absl::Status InvalidRegion(absl::string_view field, absl::string_view message) {
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
    return InvalidRegion(field,
                         absl::StrCat("offset of ", field, " is ", ref.offset, "; it must be a multiple of ",
                                      kRegionAlignment, ", at least 0"));
  }
  if (bytes > size || ref.offset > size - bytes) {
    return InvalidRegion(field, absl::StrCat(bytes, " bytes from offset ", ref.offset, " of ", field,
                                             " on do not fit its region of ", size, " bytes"));
  }
  return Range{*std::move(region), ref.offset, bytes};
}

absl::Status CheckUse(const Chunk& chunk) {
  const auto twice = [](const Payload& payload, absl::string_view payload_field, absl::string_view field) {
    return InvalidRegion(field, absl::StrCat(payload_field, " holds ", payload.size(), " bytes and ", field,
                                             " is set; only one of them may be"));
  };
  if (chunk.hidden_region.has_value() && chunk.hidden_states.size() > 0) {
    return twice(chunk.hidden_states, "hidden_states", kHidden);
  }
  if (chunk.teacher_hidden_region.has_value() && chunk.teacher_hidden.size() > 0) {
    return twice(chunk.teacher_hidden, "teacher_hidden_states", kTeacherHidden);
  }
  if (chunk.dx_region.has_value() && !HasInputGradient(chunk.mode)) {
    return InvalidRegion(
        kDx, absl::StrCat("dx_region is set, but mode is COMPUTE_MODE_",
                          chunk.mode == ComputeMode::kLossOnly ? "LOSS_ONLY" : "LOSS_AND_WEIGHT_GRADIENT",
                          ", which has no dX"));
  }
  return absl::OkStatus();
}

// The range of each tensor that is in a region.
struct ChunkRanges {
  Range hidden;
  Range teacher_hidden;
  Range dx;
};

absl::StatusOr<ChunkRanges> ResolveAll(const Chunk& chunk, const HeadConfig& head, const RegionTable& regions,
                                       const HeadConfig* teacher) {
  const int64_t elements = chunk.tokens * head.hidden_size;  // small, ValidateTokens says
  const int64_t teacher_elements = teacher == nullptr ? 0 : chunk.tokens * teacher->hidden_size;
  ChunkRanges ranges;
  const auto resolve = [&regions](const std::optional<TensorRef>& ref, int64_t count, kernels::DataType type,
                                  absl::string_view field, Range* out) {
    if (!ref.has_value()) return absl::OkStatus();
    absl::StatusOr<Range> range = Resolve(*ref, count * kernels::SizeOf(type), field, regions);
    if (!range.ok()) return range.status();
    *out = *std::move(range);
    return absl::OkStatus();
  };
  absl::Status status = resolve(chunk.hidden_region, elements, chunk.hidden_type, kHidden, &ranges.hidden);
  if (status.ok() && teacher != nullptr) {
    status = resolve(chunk.teacher_hidden_region, teacher_elements, chunk.options.distillation->hidden_type,
                     kTeacherHidden, &ranges.teacher_hidden);
  }
  if (status.ok()) status = resolve(chunk.dx_region, elements, chunk.dx_type, kDx, &ranges.dx);
  if (!status.ok()) return status;
  return ranges;
}

absl::Status CheckOverlap(const Range& dx, const Range& input, absl::string_view what) {
  if (dx.region == nullptr || input.region == nullptr || !dx.Overlaps(input)) return absl::OkStatus();
  return InvalidRegion(kDx, absl::StrCat("dX [", dx.offset, ", ", dx.offset + dx.bytes, ") overlaps ", what,
                                         " [", input.offset, ", ", input.offset + input.bytes,
                                         ") of the same region; a chunk that is sent again needs them"));
}

Payload PayloadIn(const Range& range) {
  const ByteSpan bytes(range.data(), static_cast<size_t>(range.bytes));
  return Payload::In(bytes, range.region->memory().place(), range.region);
}

}  // namespace

absl::Status ResolveRegions(Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits,
                            const RegionTable& regions, const HeadConfig* teacher) {
  if (!chunk.decode_status.ok()) return chunk.decode_status;
  if (!chunk.hidden_region.has_value() && !chunk.teacher_hidden_region.has_value() &&
      !chunk.dx_region.has_value()) {
    return absl::OkStatus();
  }
  if (absl::Status status = ValidateTokens(chunk, head, limits, teacher); !status.ok()) return status;
  if (absl::Status status = CheckUse(chunk); !status.ok()) return status;
  absl::StatusOr<ChunkRanges> ranges = ResolveAll(chunk, head, regions, teacher);
  if (!ranges.ok()) return ranges.status();
  auto& [hidden, teacher_hidden, dx] = *ranges;
  if (absl::Status status = CheckOverlap(dx, hidden, "hidden states"); !status.ok()) return status;
  if (absl::Status status = CheckOverlap(dx, teacher_hidden, "the teacher's hidden states"); !status.ok()) {
    return status;
  }
  if (hidden.region != nullptr) {
    chunk.hidden_states = PayloadIn(hidden);
    chunk.hidden_region.reset();
  }
  if (teacher_hidden.region != nullptr) {
    chunk.teacher_hidden = PayloadIn(teacher_hidden);
    chunk.teacher_hidden_region.reset();
  }
  if (dx.region != nullptr) {
    chunk.dx = {dx.data(), dx.region->memory().place(), dx.region};
    chunk.dx_region.reset();
  }
  return absl::OkStatus();
}

}  // namespace lossd::engine
