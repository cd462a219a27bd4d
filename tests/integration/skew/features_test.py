#!/usr/bin/python3
"""Today's .proto files keep the promises of docs/compatibility.md: nothing of the previous release is gone, whatever was added
to requests since names a feature, and servers list the features that the page has.

usage: features_test.py LOSSD PREVIOUS_DESCRIPTORS COMPATIBILITY_MD   with the generated stubs in PYTHONPATH
"""
import re
import sys
import unittest

import grpc
from google.protobuf import descriptor_pb2
from lossd.v1 import gradient_pb2, head_pb2, loss_pb2, region_pb2, status_pb2, status_pb2_grpc, types_pb2
from lossd_server import LossdServer

BINARY, PREVIOUS, PAGE = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
MODULES = (gradient_pb2, head_pb2, loss_pb2, region_pb2, status_pb2, types_pb2)
ALWAYS = "always"


def documented():
    """{name: since which version} of the page's table."""
    with open(PAGE, encoding="utf-8") as page:
        return dict(re.findall(r"^\| `([a-z_]+)` \| (\S+) \|", page.read(), re.MULTILINE))


def message_feature(message):
    return message.GetOptions().Extensions[types_pb2.message_feature]


def field_feature(field):
    return field.GetOptions().Extensions[types_pb2.field_feature]


def value_feature(value):
    return value.GetOptions().Extensions[types_pb2.value_feature]


class Previous:
    """Messages and enums of the previous release, by full name: {field or value number: its description}, and the names of
    its features."""

    def __init__(self):
        files = descriptor_pb2.FileDescriptorSet()
        with open(PREVIOUS, "rb") as file:
            files.ParseFromString(file.read())
        self.messages, self.enums, self.methods, self.features = {}, {}, {}, set()
        for file in files.file:
            for message in file.message_type:
                self.messages[f"{file.package}.{message.name}"] = {field.number: field for field in message.field}
                self.features.add(message.options.Extensions[types_pb2.message_feature])
                self.features.update(field.options.Extensions[types_pb2.field_feature] for field in message.field)
            for enum in file.enum_type:
                self.enums[f"{file.package}.{enum.name}"] = {value.number: value.name for value in enum.value}
                self.features.update(value.options.Extensions[types_pb2.value_feature] for value in enum.value)
            for service in file.service:
                for method in service.method:
                    self.methods[f"{file.package}.{service.name}.{method.name}"] = (method.input_type, method.output_type)


def request_messages():
    """Every message that can be in a request."""
    found = {}

    def add(message):
        if message.full_name not in found:
            found[message.full_name] = message
            for field in message.fields:
                if field.message_type is not None:
                    add(field.message_type)

    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                add(method.input_type)
    return found.values()


class Features(unittest.TestCase):
    def test_a_server_lists_what_the_files_and_the_page_have(self):
        named = set()
        for module in MODULES:
            for message in module.DESCRIPTOR.message_types_by_name.values():
                named.update([message_feature(message), *map(field_feature, message.fields)])
            for enum in module.DESCRIPTOR.enum_types_by_name.values():
                named.update(map(value_feature, enum.values))
        named.discard("")
        with LossdServer(BINARY, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
            status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest())
        self.assertEqual(list(status.features), sorted(named))
        self.assertEqual(set(documented()), named)
        self.assertGreater(len(named), 10)

    def check_added(self, name, *features):
        """What was added has a feature, and none that servers had before it."""
        self.assertTrue(any(features), f"{name} is new in a request and names no feature (proto/lossd/v1/types.proto)")
        had = {feature for feature, since in documented().items() if since == ALWAYS} | Previous().features
        self.assertTrue(any(feature not in had for feature in features if feature),
                        f"{name} is new, so that its feature cannot be one that servers had before")

    def test_whatever_is_added_to_requests_names_a_feature(self):
        previous = Previous()
        for message in request_messages():
            of_message, fields = message_feature(message), previous.messages.get(message.full_name)
            for field in message.fields:
                if fields is None:
                    # A new message: the field that leads to it is new as well, and was looked at, or the call is.
                    if any(message is method.input_type for module in MODULES
                           for service in module.DESCRIPTOR.services_by_name.values() for method in service.methods):
                        self.check_added(message.full_name, of_message)
                elif field.number not in fields:
                    of_type = message_feature(field.message_type) if field.message_type is not None else ""
                    self.check_added(f"{message.full_name}.{field.name}", field_feature(field), of_type)
                if field.enum_type is not None:
                    values = previous.enums.get(field.enum_type.full_name)
                    for value in field.enum_type.values:
                        if values is not None and value.number not in values:
                            self.check_added(f"{field.enum_type.full_name}.{value.name}", value_feature(value))

    def test_nothing_of_the_previous_release_is_gone_or_means_something_else(self):
        previous, messages, enums, methods, reserved = Previous(), {}, {}, {}, {}
        for module in MODULES:
            proto = descriptor_pb2.FileDescriptorProto()
            module.DESCRIPTOR.CopyToProto(proto)
            for message in proto.message_type:
                messages[f"{proto.package}.{message.name}"] = {field.number: field for field in message.field}
                numbers = {number for one in message.reserved_range for number in range(one.start, one.end)}
                reserved[f"{proto.package}.{message.name}"] = (numbers, set(message.reserved_name))
            for enum in proto.enum_type:
                enums[f"{proto.package}.{enum.name}"] = {value.number: value.name for value in enum.value}
            for service in proto.service:
                for method in service.method:
                    methods[f"{proto.package}.{service.name}.{method.name}"] = (method.input_type, method.output_type)
        self.assertLessEqual(previous.methods.items(), methods.items())
        for name, values in previous.enums.items():
            self.assertLessEqual(values.items(), enums[name].items(), name)
        for name, fields in previous.messages.items():
            for number, field in fields.items():
                now = messages[name].get(number)
                with self.subTest(message=name, field=field.name):
                    if now is None:  # it was retired: no other field may take its place
                        numbers, names = reserved[name]
                        self.assertIn(number, numbers)
                        self.assertIn(field.name, names)
                        continue
                    for what in ("name", "type", "type_name", "label", "proto3_optional"):
                        self.assertEqual(getattr(now, what), getattr(field, what))


if __name__ == "__main__":
    unittest.main()
