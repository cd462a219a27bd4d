#include "server/rpc/calls/methods.h"

#include <google/protobuf/descriptor.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
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
  if (absl::StartsWith(rest, "/grpc.")) return path.substr(1);
  if (!absl::StartsWith(rest, "/")) return {};
  if (!absl::ConsumePrefix(&rest, "/lossd.v1.")) return path;
  const size_t slash = rest.find('/');
  const bool is_method = slash != absl::string_view::npos && slash > 0 && slash + 1 < rest.size() &&
                         rest.find('/', slash + 1) == absl::string_view::npos &&
                         !absl::StartsWith(rest, "grpc.");
  return is_method ? path.substr(path.size() - rest.size()) : path;
}

bool IsPassedOn(std::string_view path) {
  const absl::string_view view(path.data(), path.size());
  return absl::StartsWith(view, "/lossd.v1.HeadService/") ||
         absl::StartsWith(view, "/lossd.v1.GradientService/");
}

}  // namespace lossd::rpc
