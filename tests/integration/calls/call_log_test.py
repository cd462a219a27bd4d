#!/usr/bin/python3
"""What the server's log says of calls: one line for each that failed, with its trace, and no more than an operator can read.

usage: call_log_test.py LOSSD
"""
import json
import sys
import tempfile
import unittest

import grpc
import numpy as np
from lossd.v1 import (gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, status_pb2,
                      status_pb2_grpc)
from lossd_server import LossdServer

from streaming import chunk_request, create_head, open_session, start_request

BINARY = sys.argv.pop(1)
READER, TRAINER, ADMIN = (f"{role}-0123456789abcdef" for role in ("reader", "trainer", "admin"))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)


def lines(server):
    """The lines of calls, without what else the server says."""
    return [line for line in server.log_lines() if "method" in line and line["event"] != "audit"]


def audit(server):
    return [line for line in server.log_lines() if line["event"] == "audit"]


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
        server.wait_until(lambda: len(lines(server)) >= count, f"{count} lines of calls")
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
            found = self.await_lines(server, 3)
        self.assertEqual([(line["event"], line["code"], line["level"]) for line in found],
                         [("a call ended", "OK", "debug")] * 3)
        self.assertEqual(sorted(line.get("trace_id", "") for line in found), [""] * 2 + [TRACE])

    def test_the_begin_of_sessions_and_streams_can_be_followed(self):
        with self.server("--log_level=debug") as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 16, 4)
            session = open_session(channel, "h", "k")
            stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter([start_request(session)]), metadata=PARENT)
            self.assertEqual(len(list(stream)), 1)
            loss_pb2_grpc.LossServiceStub(channel).CloseSession(
                loss_pb2.CloseSessionRequest(session_id=session.session_id), metadata=PARENT)
            self.await_lines(server, 5)
            events = {line["event"]: line for line in map(json.loads, server.log().splitlines())}
            self.assertNotIn(session.session_id, server.log())  # who knows it may send to the session
        self.assertEqual(events["a session was opened"]["head"], "h")
        self.assertEqual((events["a stream was attached"]["head"], events["a stream was attached"]["lane"],
                          events["a stream was attached"]["trace_id"]), ("h", 0, TRACE))
        self.assertEqual(events["a session was closed"]["trace_id"], TRACE)

    def await_audit(self, server, count):
        server.wait_until(lambda: len(audit(server)) >= count, f"{count} lines of the audit")

    def test_what_changes_heads_is_audited_whatever_becomes_of_it(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/tokens", "w", encoding="utf-8") as file:
                file.write(f"read-only {READER} dashboard\ntrainer {TRAINER}\nadmin {ADMIN} oncall\n")
            with self.server(f"--tokens={folder}/tokens", f"--checkpoint_dir={folder}/checkpoints") as server:
                with grpc.insecure_channel(server.target) as channel:
                    self.do_what_is_audited(channel, server)
                    self.assertEqual(server.wait(), 0)
                found = [(line["method"].split("/")[1], line["code"], line.get("head"), line.get("tag"),
                          line.get("generation"), line.get("weight_version"), line.get("token")) for line in audit(server)]
                log = server.log()
        expected = [
            ("CreateHead", "OK", "h", None, 1, None, "oncall"),
            ("CommitWrite", "OK", "h", None, None, 1, "oncall"),
            ("SaveCheckpoint", "OK", "h", "a", 1, 1, "line 2"),
            ("SaveCheckpoint", "INVALID_ARGUMENT", "h", "../a", None, None, "oncall"),
            ("RestoreCheckpoint", "OK", "h", "a", 1, 1, "oncall"),
            ("DeleteCheckpoint", "OK", "h", "a", 1, 1, "oncall"),
            ("AbortFlush", "OK", "h", None, 1, None, "oncall"),
            ("DeleteHead", "PERMISSION_DENIED", None, None, None, None, "dashboard"),
            ("DeleteHead", "UNAUTHENTICATED", None, None, None, None, None),
            ("DeleteHead", "NOT_FOUND", "x" * 256, None, None, None, "oncall"),
            ("DeleteHead", "OK", "h", None, None, None, "oncall"),
            ("Drain", "OK", None, None, None, None, "oncall")]
        self.assertEqual(found, expected)
        for line in map(json.loads, log.splitlines()):
            if line["event"] != "audit":
                continue
            self.assertEqual(line["level"], "info")
            # gRPC tells no address of a call that no service saw.
            seen = line["code"] not in ("PERMISSION_DENIED", "UNAUTHENTICATED")
            self.assertEqual(line.get("peer", "").startswith("ipv4:127.0.0.1:"), seen, line)
            self.assertEqual("message" in line, line["code"] != "OK", line)
        for secret in (READER, TRAINER, ADMIN):
            self.assertNotIn(secret, log)

    def do_what_is_audited(self, channel, server):
        heads = head_pb2_grpc.HeadServiceStub(channel)
        gradients = gradient_pb2_grpc.GradientServiceStub(channel)
        def bearer(token):
            return {"metadata": (("authorization", f"Bearer {token}"),)}
        done = 0

        def do(method, request, token=ADMIN):
            nonlocal done
            try:
                return method(request, **(bearer(token) if token else {}))
            except grpc.RpcError:
                return None
            finally:  # one after the other: a call is answered before it is logged
                done += 1
                self.await_audit(server, done)
        config = head_pb2.HeadConfig(name="h", vocab_size=16, hidden_size=4, weight_dtype=1)
        do(heads.CreateHead, head_pb2.CreateHeadRequest(config=config))
        write = heads.BeginWrite(head_pb2.BeginWriteRequest(head="h", write_key="w"), **bearer(ADMIN)).write_id
        rows = head_pb2.WriteWeightsRequest(head="h", write_id=write, rows=16, dtype=1, weights=bytes(256))
        heads.WriteWeights(iter([rows]), **bearer(ADMIN))
        do(heads.CommitWrite, head_pb2.CommitWriteRequest(head="h", write_id=write))
        do(heads.SaveCheckpoint, head_pb2.SaveCheckpointRequest(head="h", tag="a"), TRAINER)
        do(heads.SaveCheckpoint, head_pb2.SaveCheckpointRequest(head="h", tag="../a"))
        do(heads.RestoreCheckpoint, head_pb2.RestoreCheckpointRequest(head="h"))
        do(heads.DeleteCheckpoint, head_pb2.DeleteCheckpointRequest(head="h", tag="a"))
        flush = gradients.BeginFlush(gradient_pb2.BeginFlushRequest(head="h", generation=1), **bearer(ADMIN)).flush_id
        do(gradients.AbortFlush, gradient_pb2.AbortFlushRequest(head="h", flush_id=flush))
        self.assertNotIn(flush, server.log())
        self.assertIn(flush[:6], server.log())
        do(heads.DeleteHead, head_pb2.DeleteHeadRequest(name="h"), READER)
        do(heads.DeleteHead, head_pb2.DeleteHeadRequest(name="h"), None)
        do(heads.DeleteHead, head_pb2.DeleteHeadRequest(name="x" * 5000))
        do(heads.DeleteHead, head_pb2.DeleteHeadRequest(name="h"))
        status_pb2_grpc.StatusServiceStub(channel).Drain(status_pb2.DrainRequest(), **bearer(ADMIN))

    def test_failures_of_others_leave_out_nothing_that_was_done(self):
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            stub = head_pb2_grpc.HeadServiceStub(channel)

            def left_out():
                for call in [stub.DeleteHead.future(head_pb2.DeleteHeadRequest(name="absent")) for _ in range(40)]:
                    call.code()
                return any("lines_left_out" in line for line in audit(server))

            server.wait_until(left_out, "a line that says how many were left out", every=0)
            create_head(channel, "h", 16, 4)
            server.wait_until(lambda: any(line["method"] == "HeadService/CommitWrite" for line in audit(server)), "the commit")
            self.assertEqual([line["code"] for line in audit(server) if line.get("head") == "h"], ["OK", "OK"])

    def test_rejected_chunks_are_told_and_many_of_them_by_their_number(self):
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            for name in ("noisy", "quiet"):
                create_head(channel, name, 16, 4)

            def send(name, key, sequences):
                session = open_session(channel, name, key)
                chunks = (chunk_request(session, sequence, np.array([99]), np.ones((1, 4), np.float32))
                          for sequence in sequences)
                answers = loss_pb2_grpc.LossServiceStub(channel).Compute(
                    iter([start_request(session), *chunks]), metadata=PARENT)
                self.assertEqual(sum(answer.HasField("result") for answer in answers), len(sequences))
                return session

            def rejected():
                return [line for line in server.log_lines() if line["event"] == "a chunk was rejected"]

            session = send("noisy", "a", range(1, 301))
            send("quiet", "b", [1])
            server.wait_until(lambda: any(line["head"] == "quiet" for line in rejected()), "the line of the quiet head")
            found = rejected()
            self.assertNotIn(session.session_id, server.log())
        first, last = found[0], found[-1]
        self.assertEqual({key: first[key] for key in (
            "level", "head", "session", "rank", "lane", "sequence", "field", "code", "trace_id")}, {
                "level": "warning", "head": "noisy", "session": 1, "rank": 0, "lane": 0, "sequence": 1,
                "field": "labels", "code": "INVALID_ARGUMENT", "trace_id": TRACE})
        self.assertTrue(first["peer"].startswith("ipv4:127.0.0.1:"), first)
        self.assertIn("labels[0]", first["message"])
        # One head's flood hides no other's.
        self.assertEqual((last["head"], last["sequence"]), ("quiet", 1))
        self.assertLess(len(found), 100)

    def test_a_client_cannot_flood_the_log_and_what_was_left_out_is_counted(self):
        with self.server() as server, grpc.insecure_channel(server.target) as channel:
            stub = head_pb2_grpc.HeadServiceStub(channel)
            sent = 0

            def fail(count):
                nonlocal sent
                calls = [stub.GetHead.future(head_pb2.GetHeadRequest(name="absent")) for _ in range(count)]
                self.assertEqual({call.code() for call in calls}, {grpc.StatusCode.NOT_FOUND})
                sent += count

            def all_are_told():
                fail(1)  # its line, as soon as one is allowed, tells how many were left out before it
                return sum(1 + line.get("lines_left_out", 0) for line in lines(server)) == sent

            for _ in range(10):
                fail(100)
            server.wait_until(all_are_told, "lines that tell of every call, themselves or by a number", every=0.1)
            found = lines(server)
        self.assertGreaterEqual(len(found), 100)
        self.assertLess(len(found), sent)

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
