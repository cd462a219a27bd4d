#include "server/engine/common/awaiting.h"

namespace lossd::engine {

void BeginWait(absl::FunctionRef<bool()> /*is_there*/) {}

}  // namespace lossd::engine
