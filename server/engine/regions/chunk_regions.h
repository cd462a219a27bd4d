// From the regions that a chunk names to the memory that is meant.
#ifndef LOSSD_SERVER_ENGINE_REGIONS_CHUNK_REGIONS_H_
#define LOSSD_SERVER_ENGINE_REGIONS_CHUNK_REGIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/regions/region_table.h"

namespace lossd::engine {

// Offsets into a region are multiples of this, so that copies by a device are fast.
inline constexpr int64_t kRegionAlignment = 16;

// Puts what hidden_region, teacher_hidden_region and dx_region name into hidden_states, teacher_hidden and
// dx, which then keep it, and takes the names away; so it may be called again. NOT_FOUND for a region that is
// not there, INVALID_ARGUMENT naming the field for anything else that does not fit, and for sizes that
// ValidateTokens refuses. `teacher`: of the chunk's distillation, null without one.
absl::Status ResolveRegions(Chunk& chunk, const HeadConfig& head, const ChunkLimits& limits,
                            const RegionTable& regions, const HeadConfig* teacher = nullptr);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REGIONS_CHUNK_REGIONS_H_
