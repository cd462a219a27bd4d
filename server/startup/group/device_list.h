// --devices: one device a rank.
#ifndef LOSSD_SERVER_STARTUP_GROUP_DEVICE_LIST_H_
#define LOSSD_SERVER_STARTUP_GROUP_DEVICE_LIST_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd {

// "cpu,cpu", "cuda:0,cuda:1", or "all": every CUDA device of this machine, which a process of its own looks
// for, so that this one goes on without the driver. INVALID_ARGUMENT, saying what it may be, for what no
// group can be made of: names that no device has, devices of several kinds, a CUDA device twice, too many, or
// `all` where there is none.
absl::StatusOr<std::vector<std::string>> ParseDevices(const std::string& text);

// INVALID_ARGUMENT if a group cannot have as many ranks.
absl::Status CheckRanks(int32_t nodes, size_t devices_of_each);

}  // namespace lossd

#endif  // LOSSD_SERVER_STARTUP_GROUP_DEVICE_LIST_H_
