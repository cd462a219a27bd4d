// Names that every program takes on its command line.
#ifndef LOSSD_CLIENT_TOOLS_NAMES_H_
#define LOSSD_CLIENT_TOOLS_NAMES_H_

#include <map>
#include <string>
#include <vector>

#include "lossd/client.h"

namespace lossd {

// "float32" and, shorter, "fp32", and so on.
const std::map<std::string, DataType>& DataTypeNames();

// "float32", ...: what to offer.
std::vector<std::string> LongDataTypeNames();

// "none", "sgd", ...
std::vector<std::string> OptimizerNames();

}  // namespace lossd

#endif  // LOSSD_CLIENT_TOOLS_NAMES_H_
