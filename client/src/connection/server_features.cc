#include "client/src/connection/server_features.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"

namespace lossd::internal {

void ServerFeatures::Note(const v1::GetStatusResponse& status) {
  const std::lock_guard lock(mutex_);
  version_ = status.version();
  features_ = wire::Features(status.features().begin(), status.features().end());
  const wire::Features& known = wire::KnownFeatures();
  lacks_nothing_ = std::includes(features_.begin(), features_.end(), known.begin(), known.end());
}

absl::Status ServerFeatures::Check(const google::protobuf::Message& request) const {
  if (lacks_nothing_) return absl::OkStatus();
  const std::lock_guard lock(mutex_);
  const std::optional<wire::MissingFeature> missing = wire::FindMissingFeature(request, features_);
  if (!missing.has_value()) return absl::OkStatus();
  const std::string type(request.GetDescriptor()->full_name());
  return absl::UnimplementedError(
      absl::StrCat("lossd ", version_, " at ", target_, " does not have the feature '", missing->name,
                   "', which ", missing->path.empty() ? type : absl::StrCat(missing->path, " of ", type),
                   " needs; nothing was sent. Update the server (and connect anew), or do without it"));
}

}  // namespace lossd::internal
