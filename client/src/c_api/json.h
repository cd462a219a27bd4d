// What servers tell, as JSON with the names of lossd/client.h.
#ifndef LOSSD_CLIENT_SRC_C_API_JSON_H_
#define LOSSD_CLIENT_SRC_C_API_JSON_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "lossd/client.h"
#include "nlohmann/json.hpp"

namespace lossd::c_api {

using Json = nlohmann::ordered_json;

Json ToJson(const SessionMarks& marks);
Json ToJson(const LanePlace& place);
Json ToJson(const HeadInfo& info);
Json ToJson(const ServerStatus& status);
Json ToJson(const ServerMemory& memory);
Json ToJson(const Traffic& traffic);
Json ToJson(const CheckpointInfo& info);
Json ToJson(const SavedCheckpoint& saved);
Json ToJson(const DeletedCheckpoint& deleted);
Json ToJson(const LoadedWeights& loaded);
template <typename T>
Json ToJson(const std::vector<T>& items) {
  Json json = Json::array();
  for (const T& item : items) json.push_back(ToJson(item));
  return json;
}

// Bytes that are no UTF-8, which names of files may have, are replaced.
std::string TextOf(const Json& json);

// Texts as ToJson makes of SessionMarks. INVALID_ARGUMENT, naming the text, for anything else; fields that
// are not known here are left out.
absl::StatusOr<std::vector<SessionMarks>> MarksOf(const char* const* texts, size_t count);

}  // namespace lossd::c_api

#endif  // LOSSD_CLIENT_SRC_C_API_JSON_H_
