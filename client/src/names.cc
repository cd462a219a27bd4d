// What the enums of the public headers are called in JSON and on command lines; DataType's are in
// data_type.cc.
#include "lossd/client.h"

namespace lossd {

const char* Name(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kNone:
      return "none";
    case OptimizerKind::kSgd:
      return "sgd";
    case OptimizerKind::kAdam:
      return "adam";
    case OptimizerKind::kAdamW:
      return "adamw";
  }
  return "unknown";
}

const char* Name(WindowState state) {
  switch (state) {
    case WindowState::kOpen:
      return "open";
    case WindowState::kFreezing:
      return "freezing";
    case WindowState::kFrozen:
      return "frozen";
  }
  return "unknown";
}

}  // namespace lossd
