#include "server/rpc/calls/audit.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/status.pb.h"
#include "server/telemetry/common/logging.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::rpc {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

template <typename Type>
const Message& As(const void* message) {
  return *static_cast<const Type*>(message);
}

template <typename Request, typename Response>
constexpr AuditedMethod Audit(std::string_view name) {
  return {name, As<Request>, As<Response>};
}

// Rows of weights and gradients, chunks, steps and the averages that follow them are a training's daily work,
// and are not among them.
constexpr AuditedMethod kAudited[] = {
    Audit<v1::CreateHeadRequest, v1::Head>("HeadService/CreateHead"),
    Audit<v1::DeleteHeadRequest, v1::DeleteHeadResponse>("HeadService/DeleteHead"),
    Audit<v1::CommitWriteRequest, v1::CommitWriteResponse>("HeadService/CommitWrite"),
    Audit<v1::LoadWeightsRequest, v1::LoadWeightsResponse>("HeadService/LoadWeights"),
    Audit<v1::SaveCheckpointRequest, v1::SaveCheckpointResponse>("HeadService/SaveCheckpoint"),
    Audit<v1::RestoreCheckpointRequest, v1::RestoreCheckpointResponse>("HeadService/RestoreCheckpoint"),
    Audit<v1::DeleteCheckpointRequest, v1::DeleteCheckpointResponse>("HeadService/DeleteCheckpoint"),
    Audit<v1::CopyHeadRequest, v1::CopyHeadResponse>("HeadService/CopyHead"),
    Audit<v1::ParkHeadRequest, v1::ParkHeadResponse>("HeadService/ParkHead"),
    Audit<v1::AbortFlushRequest, v1::AbortFlushResponse>("GradientService/AbortFlush"),
    Audit<v1::DrainRequest, v1::DrainResponse>("StatusService/Drain"),
};

constexpr absl::string_view kFlushId = "flush_id";

// The facts of an audit line, and the fields of messages that hold them.
constexpr std::pair<const char*, absl::string_view> kFacts[] = {
    {"head", "head"},
    {"head", "name"},
    {"head", "config.name"},
    {"source", "source"},
    {"tag", "tag"},
    {"tag", "checkpoint.tag"},
    {"generation", "generation"},
    {"generation", "checkpoint.generation"},
    {"weight_version", "weight_version"},
    {"weight_version", "checkpoint.weight_version"},
    {"path", "path"},
    {"flush_id", kFlushId},
    {"discard_gradient", "discard_gradient"},
};

// Acceptable names are shorter. Longer ones are cut, so that nobody can fill the log with them.
constexpr size_t kLongestText = 256;

std::string Text(const std::string& value, absl::string_view path) {
  return path == kFlushId ? telemetry::WithoutIds(value) : value.substr(0, kLongestText);
}

// Nothing if the message has no such field, or it is at its default.
std::optional<telemetry::LogValue> ValueAt(const Message& message, absl::string_view path) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(path, absl::MaxSplits('.', 1));
  const auto [name, below] = parts;
  const FieldDescriptor* const field = message.GetDescriptor()->FindFieldByName(std::string(name));
  if (field == nullptr || field->is_repeated()) return std::nullopt;
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  if (!reflection.HasField(message, field)) return std::nullopt;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return below.empty() ? std::nullopt : ValueAt(reflection.GetMessage(message, field), below);
    case FieldDescriptor::CPPTYPE_STRING:
      return Text(reflection.GetString(message, field), path);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.GetUInt64(message, field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, field);
    default:
      return std::nullopt;
  }
}

}  // namespace

const AuditedMethod* FindAudited(std::string_view method) {
  const auto* const found =
      std::find_if(std::begin(kAudited), std::end(kAudited),
                   [&](const AuditedMethod& audited) { return audited.name == method; });
  return found == std::end(kAudited) ? nullptr : found;
}

void AddFacts(const Message& message, std::vector<telemetry::LogField>* facts) {
  for (const auto& [label, path] : kFacts) {
    std::optional<telemetry::LogValue> value = ValueAt(message, path);
    if (!value.has_value()) continue;
    const auto same =
        std::find_if(facts->begin(), facts->end(),
                     [label = std::string_view(label)](const auto& fact) { return fact.first == label; });
    if (same == facts->end()) {
      facts->emplace_back(label, *std::move(value));
    } else {
      same->second = *std::move(value);
    }
  }
}

}  // namespace lossd::rpc
