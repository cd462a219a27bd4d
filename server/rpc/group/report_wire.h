// What ranks tell of themselves, as messages that hold what has changed.
#ifndef LOSSD_SERVER_RPC_GROUP_REPORT_WIRE_H_
#define LOSSD_SERVER_RPC_GROUP_REPORT_WIRE_H_

#include "absl/status/status.h"
#include "lossd/group/v1/group.pb.h"
#include "server/engine/device/device_report.h"

namespace lossd::rpc {

// One thread's.
class ReportWriter {
 public:
  // Without what is as it was at the last call.
  group::v1::Report Changed(const engine::RankReport& report);

 private:
  group::v1::Report last_;
};

// INTERNAL if it makes no sense; `report` may then be changed in part.
absl::Status TakeReport(const group::v1::Report& message, engine::RankReport* report);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_REPORT_WIRE_H_
