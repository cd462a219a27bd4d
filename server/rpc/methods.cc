#include "server/rpc/methods.h"

#include <google/protobuf/descriptor.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/region.pb.h"
#include "lossd/v1/status.pb.h"

namespace lossd::rpc {

std::vector<std::string> MethodNames() {
  using google::protobuf::FileDescriptor;
  // A file that declares a service describes it whether or not its messages were used.
  const FileDescriptor* const files[] = {
      v1::CreateHeadRequest::descriptor()->file(), v1::ComputeRequest::descriptor()->file(),
      v1::BeginFlushRequest::descriptor()->file(), v1::CreateRegionRequest::descriptor()->file(),
      v1::GetStatusRequest::descriptor()->file()};
  std::vector<std::string> names;
  for (const FileDescriptor* file : files) {
    for (int s = 0; s < file->service_count(); ++s) {
      const auto* service = file->service(s);
      for (int m = 0; m < service->method_count(); ++m) {
        names.push_back(absl::StrCat(service->name(), "/", service->method(m)->name()));
      }
    }
  }
  return names;
}

std::string_view MethodOfPath(std::string_view path) {
  absl::string_view rest(path.data(), path.size());
  if (!absl::ConsumePrefix(&rest, "/lossd.v1.")) absl::ConsumePrefix(&rest, "/");
  return {rest.data(), rest.size()};
}

}  // namespace lossd::rpc
