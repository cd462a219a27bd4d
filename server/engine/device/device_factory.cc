#include "server/engine/device/device_factory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr absl::string_view kAuto = "auto";

absl::StatusOr<ChosenDevice> CreateFirst(DeviceOptions options) {
  ChosenDevice chosen;
  absl::Status failed;
  for (const DeviceKind& kind : DeviceKinds()) {
    options.name = kind.automatic;
    absl::StatusOr<std::unique_ptr<Device>> device = kind.create(options);
    if (device.ok()) {
      chosen.device = *std::move(device);
      return chosen;
    }
    failed = device.status();
    if (chosen.why_cpu.empty()) chosen.why_cpu = std::string(failed.message());
  }
  return failed;
}

}  // namespace

bool IsDeviceName(absl::string_view name) {
  const auto kinds = DeviceKinds();
  return name == kAuto ||
         std::any_of(kinds.begin(), kinds.end(), [name](const DeviceKind& kind) { return kind.knows(name); });
}

std::string KindOf(absl::string_view name) { return std::string(name.substr(0, name.find(':'))); }

std::vector<std::string> AllAccelerators() {
  std::vector<std::string> names;
  for (const DeviceKind& kind : DeviceKinds()) {
    const int count = kind.accelerators();
    for (int i = 0; i < count; ++i) names.push_back(absl::StrCat(KindOf(kind.automatic), ":", i));
  }
  return names;
}

absl::StatusOr<ChosenDevice> CreateDevice(const DeviceOptions& options) {
  if (options.name == kAuto) return CreateFirst(options);
  for (const DeviceKind& kind : DeviceKinds()) {
    if (!kind.knows(options.name)) continue;
    absl::StatusOr<std::unique_ptr<Device>> device = kind.create(options);
    if (!device.ok()) return device.status();
    return ChosenDevice{.device = *std::move(device), .why_cpu = {}};
  }
  return MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kInternal, "device",
                   absl::StrCat("there is no device called ", options.name));
}

}  // namespace lossd::engine
