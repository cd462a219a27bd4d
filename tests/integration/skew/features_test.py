#!/usr/bin/python3
"""Servers list the features that the .proto files name, and docs/compatibility.md has a row for each.

usage: features_test.py LOSSD COMPATIBILITY_MD   with the generated stubs in PYTHONPATH
"""
import re
import sys
import unittest

import grpc
from lossd.v1 import gradient_pb2, head_pb2, loss_pb2, region_pb2, status_pb2, status_pb2_grpc, types_pb2
from lossd_server import LossdServer

BINARY, PAGE = sys.argv.pop(1), sys.argv.pop(1)
MODULES = (gradient_pb2, head_pb2, loss_pb2, region_pb2, status_pb2, types_pb2)


def documented():
    """The names in the page's table."""
    with open(PAGE, encoding="utf-8") as page:
        return re.findall(r"^\| `([a-z_]+)` \|", page.read(), re.MULTILINE)


def named():
    """The names in the options of messages, fields and values."""
    names = set()
    for module in MODULES:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            names.add(message.GetOptions().Extensions[types_pb2.message_feature])
            names.update(field.GetOptions().Extensions[types_pb2.field_feature] for field in message.fields)
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            names.update(value.GetOptions().Extensions[types_pb2.value_feature] for value in enum.values)
    return sorted(names - {""})


class Features(unittest.TestCase):
    def test_a_server_lists_what_the_files_and_the_page_have(self):
        with LossdServer(BINARY, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
            status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest())
        self.assertEqual(list(status.features), named())
        self.assertEqual(documented(), named())
        self.assertGreater(len(named()), 10)


if __name__ == "__main__":
    unittest.main()
