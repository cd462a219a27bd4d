// A head in the configuration file.
#ifndef LOSSD_SERVER_STARTUP_HEAD_ENTRY_H_
#define LOSSD_SERVER_STARTUP_HEAD_ENTRY_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/chunk/head_config.h"

namespace lossd {

struct HeadEntry {
  engine::HeadConfig config;
  // What it is loaded with at start, as LoadWeights takes it; empty: nothing.
  std::string weights;
  std::string weights_tensor;
  std::string weights_bias_tensor;
};

// All keys that an entry may have.
std::vector<std::string> HeadKeys();

// name, vocab_size and hidden_size are needed. INVALID_ARGUMENT naming the key and its value for what is
// missing, misspelt, of another JSON type or out of range.
absl::StatusOr<HeadEntry> ReadHeadEntry(const nlohmann::json& entry);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_HEAD_ENTRY_H_
