#!/usr/bin/python3
"""What the server's log says of calls: one line for each that failed, with its trace, and no more than an operator can read.

usage: call_log_test.py LOSSD
"""
import json
import sys
import tempfile
import unittest

import grpc
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc
from lossd_server import LossdServer

from streaming import create_head, open_session, start_request

BINARY = sys.argv.pop(1)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)


def lines(server):
    """Of calls, without what else the server says."""
    found = [json.loads(line) for line in server.log().splitlines()]
    return [line for line in found if "method" in line]


def get_head(channel, name, **arguments):
    try:
        head_pb2_grpc.HeadServiceStub(channel).GetHead(head_pb2.GetHeadRequest(name=name), **arguments)
    except grpc.RpcError as error:
        return error
    return None


class CallLog(unittest.TestCase):
    def server(self, *flags):
        return LossdServer(BINARY, "--device=cpu", "--log_format=json", *flags)

    def await_lines(self, server, count):
        while len(lines(server)) < count:
            pass
        return lines(server)

    def test_a_failed_call_has_a_line_with_all_that_is_needed_to_find_it(self):
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            error = get_head(channel, "absent", metadata=PARENT)
            line, = self.await_lines(server, 1)
        self.assertEqual(line["level"], "info")
        self.assertEqual(line["event"], "a call failed")
        self.assertEqual(line["method"], "HeadService/GetHead")
        self.assertEqual(line["code"], "NOT_FOUND")
        self.assertEqual(line["message"], error.details())
        self.assertTrue(line["peer"].startswith("ipv4:127.0.0.1:"), line["peer"])
        self.assertEqual(line["trace_id"], TRACE)
        self.assertGreater(line["seconds"], 0)

    def test_a_refused_call_has_a_line_without_the_address_that_grpc_does_not_tell(self):
        with tempfile.NamedTemporaryFile("w") as tokens:
            tokens.write("admin 0123456789abcdef\n")
            tokens.flush()
            with self.server(f"--tokens={tokens.name}") as server, grpc.insecure_channel(server.target) as channel:
                error = get_head(channel, "absent", metadata=PARENT)
                line, = self.await_lines(server, 1)
        self.assertEqual((line["code"], line["message"], line["trace_id"]), ("UNAUTHENTICATED", error.details(), TRACE))
        self.assertNotIn("peer", line)

    def test_calls_that_succeed_have_lines_when_asked_for(self):
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 16, 4)
            get_head(channel, "absent")
            self.assertEqual([line["code"] for line in self.await_lines(server, 1)], ["NOT_FOUND"])
        with self.server("--log_level=debug") as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 16, 4)
            get_head(channel, "h", metadata=PARENT)
            found = self.await_lines(server, 5)
        self.assertEqual([(line["event"], line["code"], line["level"]) for line in found],
                         [("a call ended", "OK", "debug")] * 5)
        self.assertEqual(sorted(line.get("trace_id", "") for line in found), [""] * 4 + [TRACE])

    def test_the_begin_of_sessions_and_streams_can_be_followed(self):
        with self.server("--log_level=debug") as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 16, 4)
            session = open_session(channel, "h", "k")
            stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter([start_request(session)]), metadata=PARENT)
            self.assertEqual(len(list(stream)), 1)
            loss_pb2_grpc.LossServiceStub(channel).CloseSession(
                loss_pb2.CloseSessionRequest(session_id=session.session_id), metadata=PARENT)
            self.await_lines(server, 7)
            events = {line["event"]: line for line in map(json.loads, server.log().splitlines())}
            self.assertNotIn(session.session_id, server.log())  # who knows it may send to the session
        self.assertEqual(events["a session was opened"]["head"], "h")
        self.assertEqual((events["a stream was attached"]["head"], events["a stream was attached"]["lane"],
                          events["a stream was attached"]["trace_id"]), ("h", 0, TRACE))
        self.assertEqual(events["a session was closed"]["trace_id"], TRACE)

    def test_a_client_cannot_flood_the_log(self):
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            stub = head_pb2_grpc.HeadServiceStub(channel)
            for _ in range(40):
                calls = [stub.GetHead.future(head_pb2.GetHeadRequest(name="absent")) for _ in range(100)]
                self.assertEqual({call.code() for call in calls}, {grpc.StatusCode.NOT_FOUND})
            server.stop()
            found = lines(server)
        seconds = 60  # far more than it took
        self.assertLess(len(found), 100 + 20 * seconds)
        self.assertLess(len(found), 4000)
        self.assertGreaterEqual(len(found), 100)

    def test_what_was_left_out_is_counted(self):
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            stub = head_pb2_grpc.HeadServiceStub(channel)
            told, sent = 0, 0
            while not any("lines_left_out" in line for line in lines(server)):
                calls = [stub.GetHead.future(head_pb2.GetHeadRequest(name="absent")) for _ in range(200)]
                sent += sum(call.code() == grpc.StatusCode.NOT_FOUND for call in calls)
            server.stop()
            told = sum(1 + line.get("lines_left_out", 0) for line in lines(server))
        self.assertLessEqual(told, sent)

    def test_what_clients_write_stays_within_its_line(self):
        name = 'x"\n{"event":"forged"}'
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            get_head(channel, name)
            get_head(channel, "absent", metadata=(("traceparent", f'00-{TRACE}-00f067aa0ba902b7-01" forged="1'),))
            # Calls are answered before they are logged: their lines may change places.
            second, = [line for line in self.await_lines(server, 2) if "absent" in line["message"]]
            first, = [line for line in self.await_lines(server, 2) if line != second]
        self.assertIn(name, first["message"])
        self.assertNotIn("trace_id", second)
        self.assertNotIn("forged", second)


if __name__ == "__main__":
    unittest.main()
