#include "client/tools/names.h"

#include "absl/strings/str_cat.h"

namespace lossd {
namespace {

std::string ShortName(DataType type) {
  return absl::StrCat(type == DataType::kBFloat16 ? "bf" : "fp", 8 * SizeOf(type));
}

}  // namespace

const std::map<std::string, DataType>& DataTypeNames() {
  static const auto& names = *new auto([] {
    std::map<std::string, DataType> all;
    for (const DataType type : kDataTypes) {
      all.emplace(Name(type), type);
      all.emplace(ShortName(type), type);
    }
    return all;
  }());
  return names;
}

std::vector<std::string> LongDataTypeNames() {
  std::vector<std::string> names;
  for (const DataType type : kDataTypes) names.emplace_back(Name(type));
  return names;
}

std::vector<std::string> OptimizerNames() {
  std::vector<std::string> names;
  for (const OptimizerKind kind : kOptimizerKinds) names.emplace_back(Name(kind));
  return names;
}

}  // namespace lossd
