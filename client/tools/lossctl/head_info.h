// How a head is shown: a row of a table, or a JSON object.
#ifndef LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_INFO_H_
#define LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_INFO_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "lossd/client.h"
#include "nlohmann/json_fwd.hpp"

namespace lossd::tools {

nlohmann::ordered_json HeadToJson(const HeadInfo& head);
// {"purpose": bytes, ...}
nlohmann::ordered_json MemoryToJson(const std::vector<MemoryItem>& items);
int64_t TotalBytes(const std::vector<MemoryItem>& items);

// A table of all heads, with a line below it for each flush that holds a window; or a sentence that says how
// to make one.
std::string HeadsTable(const std::vector<HeadInfo>& heads);

// ", softcap 30, frozen": what is not plain about it, behind `before`; nothing if all is plain.
std::string DescribeOptions(const HeadConfig& config, absl::string_view before);
// "50,257 x 768 bfloat16"
std::string DescribeShape(int64_t rows, int64_t columns, DataType type);

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_LOSSCTL_HEAD_INFO_H_
