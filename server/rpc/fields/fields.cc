#include "server/rpc/fields/fields.h"

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::rpc {

void FieldReader::Fail(const char* wrong) {
  if (!ok()) return;
  std::string path;
  for (const Place* place = place_; place != nullptr; place = place->outer) {
    path = place->name == nullptr ? absl::StrCat("[", place->index, "]", path)
                                  : absl::StrCat(".", place->name, path);
  }
  error_ = engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, what_,
                             absl::StrCat(what_, path, " ", wrong, ", at byte ", cbor_.position()));
}

absl::Status FieldReader::Finish() {
  Take(cbor_.done(), "is followed by more bytes");
  return error_;
}

}  // namespace lossd::rpc
