#include "proto/wire/features.h"

#include <google/protobuf/descriptor.h>

#include "lossd/v1/gradient.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/region.pb.h"
#include "lossd/v1/status.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Empty names are no features, and std::set is asked by whole strings.
const std::string& FeatureOf(const Descriptor& message) {
  return message.options().GetExtension(v1::message_feature);
}
const std::string& FeatureOf(const FieldDescriptor& field) {
  return field.options().GetExtension(v1::field_feature);
}
const std::string& FeatureOf(const google::protobuf::EnumValueDescriptor& value) {
  return value.options().GetExtension(v1::value_feature);
}

void AddFeatures(const EnumDescriptor& type, Features* features) {
  for (int i = 0; i < type.value_count(); ++i) features->insert(FeatureOf(*type.value(i)));
}

void AddFeatures(const Descriptor& type, Features* features) {
  features->insert(FeatureOf(type));
  for (int i = 0; i < type.field_count(); ++i) features->insert(FeatureOf(*type.field(i)));
  for (int i = 0; i < type.enum_type_count(); ++i) AddFeatures(*type.enum_type(i), features);
  for (int i = 0; i < type.nested_type_count(); ++i) AddFeatures(*type.nested_type(i), features);
}

Features CollectFeatures() {
  Features features;
  for (const google::protobuf::FileDescriptor* file :
       {v1::LaneMarks::descriptor()->file(), v1::HeadConfig::descriptor()->file(),
        v1::Chunk::descriptor()->file(), v1::BeginFlushRequest::descriptor()->file(),
        v1::CreateRegionRequest::descriptor()->file(), v1::GetStatusRequest::descriptor()->file()}) {
    for (int i = 0; i < file->enum_type_count(); ++i) AddFeatures(*file->enum_type(i), &features);
    for (int i = 0; i < file->message_type_count(); ++i) AddFeatures(*file->message_type(i), &features);
  }
  features.erase("");
  return features;
}

bool Lacks(const Features& server, const std::string& feature) {
  return !feature.empty() && server.find(feature) == server.end();
}

std::string Joined(const std::string& step, const std::string& rest) {
  return rest.empty() ? step : step + "." + rest;
}

std::optional<MissingFeature> FindInField(const Message& message, const FieldDescriptor& field,
                                          const Features& server) {
  const Reflection& reflection = *message.GetReflection();
  const int count = field.is_repeated() ? reflection.FieldSize(message, &field)
                                        : static_cast<int>(reflection.HasField(message, &field));
  if (count == 0) return std::nullopt;
  if (Lacks(server, FeatureOf(field))) return MissingFeature{FeatureOf(field), field.name()};
  for (int index = 0; index < count; ++index) {
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      auto missing =
          FindMissingFeature(field.is_repeated() ? reflection.GetRepeatedMessage(message, &field, index)
                                                 : reflection.GetMessage(message, &field),
                             server);
      if (missing.has_value()) return MissingFeature{missing->name, Joined(field.name(), missing->path)};
    } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
      const int number = field.is_repeated() ? reflection.GetRepeatedEnumValue(message, &field, index)
                                             : reflection.GetEnumValue(message, &field);
      const auto* value = field.enum_type()->FindValueByNumber(number);
      if (value != nullptr && Lacks(server, FeatureOf(*value))) {
        return MissingFeature{FeatureOf(*value), field.name()};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

const Features& KnownFeatures() {
  static const Features* const features = new Features(CollectFeatures());  // for the life of the process
  return *features;
}

std::optional<MissingFeature> FindMissingFeature(const Message& message, const Features& server) {
  const Descriptor& type = *message.GetDescriptor();
  if (Lacks(server, FeatureOf(type))) return MissingFeature{FeatureOf(type), ""};
  for (int i = 0; i < type.field_count(); ++i) {
    if (auto missing = FindInField(message, *type.field(i), server); missing.has_value()) return missing;
  }
  return std::nullopt;
}

}  // namespace lossd::wire
