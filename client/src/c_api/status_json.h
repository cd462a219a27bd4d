// What servers tell of the processes that compute heads together, as JSON with the names of lossd/client.h:
// for liblossd_c, and for lossctl.
#ifndef LOSSD_CLIENT_SRC_C_API_STATUS_JSON_H_
#define LOSSD_CLIENT_SRC_C_API_STATUS_JSON_H_

#include "lossd/client.h"
#include "nlohmann/json.hpp"

namespace lossd::c_api {

nlohmann::ordered_json ToJson(const RankStatus& rank);
// Null if the server is in none.
nlohmann::ordered_json ToJson(const ReplicaSetStatus& set);

}  // namespace lossd::c_api

#endif  // LOSSD_CLIENT_SRC_C_API_STATUS_JSON_H_
