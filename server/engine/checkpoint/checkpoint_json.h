// A head's checkpoint to JSON and back. Throws: nlohmann's exceptions for what is missing or of another type,
// std::invalid_argument for values that cannot be.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

// Reads an integer from `least` to `most`. The library would also convert 2.5, true and numbers with more
// bits.
int64_t ToInteger(const nlohmann::json& value, int64_t least, int64_t most);
// Likewise from 0 to a fourth of what fits: larger than any number that comes about, and small enough to go
// on counting from.
int64_t ToCount(const nlohmann::json& value);

nlohmann::json ToJson(const HeadCheckpoint& head);
// Chunks in tiles get their sizes, but no bytes yet; how long lists are is in the file of the tiles. The
// caller still has to check whether a head can have this configuration.
HeadCheckpoint HeadFromJson(const nlohmann::json& from);

nlohmann::json ToJson(const DeterministicTiles::Content& tiles);
DeterministicTiles::Content TilesFromJson(const nlohmann::json& from);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_
