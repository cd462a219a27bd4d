#!/usr/bin/python3
"""Requests that hold what this server does not know are refused, whatever method they are of and however deep it lies. The
methods are those of the descriptors: a new one is called too, and fails here if it drops what it does not know.

usage: strict_requests_test.py LOSSD   with the generated stubs in PYTHONPATH
"""
import sys
import unittest

import grpc
import numpy as np
from google.protobuf import message_factory
from lossd.v1 import gradient_pb2, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, region_pb2, status_pb2, status_pb2_grpc, types_pb2
from lossd_server import LossdServer

BINARY = sys.argv.pop(1)
UNKNOWN = 12345  # a field that no message has
UNKNOWN_BYTES = b"\xc8\x83\x06\x01"  # that field, a number 1
UNKNOWN_VALUE = 4242  # of no enum
F32 = types_pb2.DATA_TYPE_FLOAT32
# These only ask what there is, so that old servers answer new clients, above all when asked what they can do.
ONLY_ASK = {"/lossd.v1.StatusService/GetStatus", "/lossd.v1.StatusService/GetMemory", "/lossd.v1.HeadService/ListHeads",
            "/lossd.v1.HeadService/GetHead", "/lossd.v1.HeadService/ListCheckpoints"}


def methods():
    """(path, descriptor) of every method."""
    for module in (gradient_pb2, head_pb2, loss_pb2, region_pb2, status_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


def new_message(descriptor):
    try:
        return message_factory.GetMessageClass(descriptor)()
    except AttributeError:  # protobuf before 4.22
        return message_factory.MessageFactory().GetPrototype(descriptor)()


def places(descriptor, way=()):
    """Ways of fields to every message that can be inside one of this type, itself included."""
    yield way, descriptor
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from places(field.message_type, (*way, field))


def go(message, way):
    """The message at the end of the way, which is set."""
    for field in way:
        inner = getattr(message, field.name)
        message = inner.add() if field.label == field.LABEL_REPEATED else inner
        message.SetInParent()
    return message


def call(channel, path, message):
    """(code, details) of a call with one message, whatever kind of stream the method is."""
    stream = channel.stream_stream(path)(iter([message.SerializeToString()]), timeout=60)
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        pass
    return stream.code(), stream.details()


class EveryMethod(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = LossdServer(BINARY, "--device=cpu")
        cls.server.__enter__()
        cls.addClassCleanup(cls.server.__exit__)
        cls.channel = grpc.insecure_channel(cls.server.target)
        cls.addClassCleanup(cls.channel.close)
        status = status_pb2_grpc.StatusServiceStub(cls.channel)
        cls.version = status.GetStatus(status_pb2.GetStatusRequest()).version

    def check(self, path, request, *words):
        code, details = call(self.channel, path, request)
        if path in ONLY_ASK:
            self.assertNotIn(str(UNKNOWN), details or "", path)
            return
        self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT, f"{path}: {details}")
        for word in (*words, f"lossd {self.version}"):
            self.assertIn(word, details)

    def test_no_unknown_field_is_dropped(self):
        seen = set()
        for path, method in methods():
            for way, descriptor in places(method.input_type):
                request = new_message(method.input_type)
                go(request, way).MergeFromString(UNKNOWN_BYTES)
                with self.subTest(path=path, way=[field.name for field in way]):
                    self.check(path, request, f"field {UNKNOWN} of {descriptor.full_name}")
                seen.add(descriptor.name)
        self.assertLessEqual({"LossOptions", "WantedReturns", "Distillation", "TensorRef", "TokenInputs", "ComputeStart",
                              "Optimizer", "LaneMarks", "DrainRequest"}, seen)

    def test_no_unknown_value_of_an_enum_is_dropped(self):
        seen = set()
        for path, method in methods():
            for way, descriptor in places(method.input_type):
                for field in descriptor.fields:
                    if field.enum_type is None:
                        continue
                    request = new_message(method.input_type)
                    setattr(go(request, way), field.name, UNKNOWN_VALUE)
                    with self.subTest(path=path, way=[f.name for f in way], field=field.name):
                        self.check(path, request, f"{field.name} is {UNKNOWN_VALUE}",
                                   f"field {field.number} of {descriptor.full_name}")
                    seen.add(field.enum_type.name)
        self.assertLessEqual({"DataType", "OptimizerKind", "ComputeMode", "Divergence", "RegionKind"}, seen)

    def test_a_known_field_of_another_type_is_not_dropped_either(self):
        request = head_pb2.BeginWriteRequest(head="h")
        request.MergeFromString(b"\x10\x01")  # write_key, a string, as a number
        code, details = call(self.channel, "/lossd.v1.HeadService/BeginWrite", request)
        self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("field 2 of lossd.v1.BeginWriteRequest", details)


class Chunks(unittest.TestCase):
    """A session has its lane attached, so the reader that does not copy takes its chunks."""

    def test_a_chunk_of_a_newer_client_is_not_taken(self):
        rng = np.random.default_rng(3)
        vocab, hidden, tokens = 32, 8, 4
        with LossdServer(BINARY, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
            heads, losses = head_pb2_grpc.HeadServiceStub(channel), loss_pb2_grpc.LossServiceStub(channel)
            heads.CreateHead(head_pb2.CreateHeadRequest(
                config=head_pb2.HeadConfig(name="h", vocab_size=vocab, hidden_size=hidden, weight_dtype=F32)))
            write_id = heads.BeginWrite(head_pb2.BeginWriteRequest(head="h", write_key="w")).write_id
            heads.WriteWeights(iter([head_pb2.WriteWeightsRequest(
                head="h", write_id=write_id, rows=vocab, dtype=F32,
                weights=rng.normal(0, 1, (vocab, hidden)).astype(np.float32).tobytes())]))
            heads.CommitWrite(head_pb2.CommitWriteRequest(head="h", write_id=write_id))
            session = losses.OpenSession(loss_pb2.OpenSessionRequest(head="h", client_key="c"))
            start = loss_pb2.ComputeRequest(
                start=loss_pb2.ComputeStart(session_id=session.session_id, incarnation=session.incarnation))
            chunk = loss_pb2.Chunk(sequence=1, generation=session.generation, tokens=tokens, hidden_dtype=F32,
                                   labels=rng.integers(0, vocab, tokens).tobytes(),
                                   hidden_states=rng.normal(0, 1, (tokens, hidden)).astype(np.float32).tobytes())
            for way in (("options",), ("options", "distillation"), ("options", "returns"), ("token_inputs",), ()):
                newer = loss_pb2.ComputeRequest(chunk=chunk)
                inner = newer.chunk
                for name in way:
                    inner = getattr(inner, name)
                inner.MergeFromString(UNKNOWN_BYTES)
                with self.subTest(way=way):
                    stream = losses.Compute(iter([start, newer]))
                    with self.assertRaises(grpc.RpcError) as refused:
                        list(stream)
                    self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                    self.assertIn(f"field {UNKNOWN} of lossd.v1.{inner.DESCRIPTOR.name}", refused.exception.details())
                    # Not even as a rejected one: a newer server, should it take this one's place, would understand it.
                    self.assertEqual(len(heads.GetHead(head_pb2.GetHeadRequest(name="h")).sessions), 0)
            answers = list(losses.Compute(iter([start, loss_pb2.ComputeRequest(chunk=chunk)])))
            result = next(answer.result for answer in answers if answer.HasField("result"))
            self.assertEqual(result.disposition, loss_pb2.DISPOSITION_ACCUMULATED)
            self.assertEqual(heads.GetHead(head_pb2.GetHeadRequest(name="h")).window_tokens, tokens)


if __name__ == "__main__":
    unittest.main()
