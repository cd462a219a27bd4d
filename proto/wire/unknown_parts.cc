#include "proto/wire/unknown_parts.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/unknown_field_set.h>

namespace lossd::wire {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

std::string StepTo(const FieldDescriptor& field, int index) {
  return field.is_repeated() ? field.name() + "[" + std::to_string(index) + "]" : field.name();
}

// One field that is set, or the element at `index` of a repeated one.
std::optional<UnknownPart> FindInElement(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& reflection = *message.GetReflection();
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    std::optional<UnknownPart> found =
        FindUnknownPart(field.is_repeated() ? reflection.GetRepeatedMessage(message, &field, index)
                                            : reflection.GetMessage(message, &field));
    if (found.has_value()) found->path = StepTo(field, index) + "." + found->path;
    return found;
  }
  const int value = field.is_repeated() ? reflection.GetRepeatedEnumValue(message, &field, index)
                                        : reflection.GetEnumValue(message, &field);
  if (field.enum_type()->FindValueByNumber(value) != nullptr) return std::nullopt;
  return UnknownPart{message.GetDescriptor(), field.number(), StepTo(field, index), field.enum_type(), value};
}

}  // namespace

std::optional<UnknownPart> FindUnknownPart(const Message& message) {
  const Reflection& reflection = *message.GetReflection();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  if (const auto& unknown = reflection.GetUnknownFields(message); !unknown.empty()) {
    const int number = unknown.field(0).number();
    return UnknownPart{&type, number, std::to_string(number)};
  }
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE &&
        field.cpp_type() != FieldDescriptor::CPPTYPE_ENUM) {
      continue;
    }
    const int count = field.is_repeated() ? reflection.FieldSize(message, &field)
                                          : static_cast<int>(reflection.HasField(message, &field));
    for (int index = 0; index < count; ++index) {
      if (auto found = FindInElement(message, field, index); found.has_value()) return found;
    }
  }
  return std::nullopt;
}

}  // namespace lossd::wire
