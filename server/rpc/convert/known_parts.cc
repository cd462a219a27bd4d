#include "server/rpc/convert/known_parts.h"

#include <google/protobuf/descriptor.h>

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/wire/unknown_parts.h"
#include "server/engine/common/errors.h"
#include "server/version.h"

namespace lossd::rpc {
namespace {

absl::Status Refuse(absl::string_view path, absl::string_view message) {
  return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kUnknownField, path,
                           absl::StrCat(message, "; nothing was done"));
}

// "DATA_TYPE_FLOAT32 (1), ...", without the one that stands for nothing.
std::string ValuesOf(const google::protobuf::EnumDescriptor& type) {
  std::string values;
  for (int i = 0; i < type.value_count(); ++i) {
    if (type.value(i)->number() == 0) continue;
    absl::StrAppend(&values, values.empty() ? "" : ", ", type.value(i)->name(), " (", type.value(i)->number(),
                    ")");
  }
  return values;
}

}  // namespace

absl::Status CheckKnown(const google::protobuf::Message& request) {
  const std::optional<wire::UnknownPart> unknown = wire::FindUnknownPart(request);
  if (!unknown.has_value()) return absl::OkStatus();
  const std::string field = absl::StrCat("field ", unknown->field, " of ", unknown->message->full_name());
  const std::string what =
      unknown->enumeration == nullptr
          ? absl::StrCat(field, " (", unknown->path, ") is not known to this server, lossd ", kVersion)
          : absl::StrCat(unknown->path, " is ", unknown->value, " (", field, "); this server, lossd ",
                         kVersion, ", knows ", ValuesOf(*unknown->enumeration));
  return Refuse(unknown->path, absl::StrCat(what,
                                            ". A client that is newer than its server must do without, "
                                            "or the server be updated"));
}

}  // namespace lossd::rpc
