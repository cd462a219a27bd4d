// A head's checkpoint to JSON and back. Throws: nlohmann's exceptions for what is missing or of another type,
// std::invalid_argument for values that cannot be.
#ifndef LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_
#define LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>

#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

// An integer from `least` to `most`. The library would make one of 2.5, of true, and of what has more bits.
int64_t ToInteger(const nlohmann::json& value, int64_t least, int64_t most);

nlohmann::json ToJson(const HeadCheckpoint& head);
// Chunks that tiles keep have their sizes, and no bytes yet. Whether the configuration is one that a head can
// have is left to be checked.
HeadCheckpoint HeadFromJson(const nlohmann::json& from);

nlohmann::json ToJson(const DeterministicTiles::Content& tiles);
DeterministicTiles::Content TilesFromJson(const nlohmann::json& from);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_
