// A flush that was interrupted while the server froze the window: nobody knows its id, and whatever comes
// next would wait for its end. So it ends before anything else is done.
#ifndef LOSSD_CLIENT_SRC_GRADIENT_OPEN_FREEZE_H_
#define LOSSD_CLIENT_SRC_GRADIENT_OPEN_FREEZE_H_

#include "absl/status/status.h"
#include "client/src/common/head_context.h"
#include "lossd/v1/gradient.pb.h"

namespace lossd::internal {

v1::BeginFlushRequest RequestOf(const HeadContext& head, const OpenFreeze& freeze);

// Reopens the window, whole, if there is such a flush and it has frozen it. An error: that is not known yet.
absl::Status SettleFreeze(HeadContext& head);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_GRADIENT_OPEN_FREEZE_H_
