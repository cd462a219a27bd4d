#!/usr/bin/python3
"""Checkpoints of the server as a process, seen by stock gRPC and by lossctl: flags, full disks, damage, drains.

usage: checkpoint_test.py LOSSD LOSSCTL
"""
import json
import os
import resource
import signal
import stat
import sys
import tempfile
import time
import unittest

import grpc
import numpy as np
import programs
from lossd.v1 import (gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2_grpc, status_pb2, status_pb2_grpc,
                      types_pb2)
from lossd_server import LossdServer, ReplicaSet

from streaming import OPTIONS, chunk_request, create_head, open_session, start_request

LOSSD, LOSSCTL = sys.argv[1:3]
del sys.argv[1:3]
VOCAB, HIDDEN = 200, 16
FLAGS = ["--device=cpu", "--workspace_bytes=16777216"]


def run(*flags, **options):
    return programs.run(LOSSD, "--listen=127.0.0.1:0", "--metrics_listen=", *FLAGS, *flags, **options)


def connect(server):
    return grpc.insecure_channel(server.target, options=OPTIONS)


def add_chunks(channel, session, sequences):
    """Returns how far the server has applied them."""
    def requests():
        yield start_request(session)
        for sequence in sequences:
            rng = np.random.default_rng(sequence)
            yield chunk_request(session, sequence, rng.integers(0, VOCAB, 8), rng.standard_normal((8, HIDDEN), np.float32))
    applied = 0
    for response in loss_pb2_grpc.LossServiceStub(channel).Compute(requests()):
        if response.HasField("applied"):
            applied = response.applied.applied
    return applied


class Checkpoints(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "checkpoints")

    def server(self, *flags):
        return LossdServer(LOSSD, *FLAGS, f"--checkpoint_dir={self.folder}", *flags)

    def save(self, channel, tag, head="h"):
        return head_pb2_grpc.HeadServiceStub(channel).SaveCheckpoint(head_pb2.SaveCheckpointRequest(head=head, tag=tag))

    def restore(self, channel, tag, head="h"):
        return head_pb2_grpc.HeadServiceStub(channel).RestoreCheckpoint(
            head_pb2.RestoreCheckpointRequest(head=head, tag=tag))

    def head(self, channel):
        return head_pb2_grpc.HeadServiceStub(channel).GetHead(head_pb2.GetHeadRequest(name="h"))

    def assertFails(self, code, words, call, *arguments):
        with self.assertRaises(grpc.RpcError) as caught:
            call(*arguments)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertIn(words, caught.exception.details())
        self.assertNotIn(self.folder, caught.exception.details())

    def files(self):
        """All but the lock, which is there as soon as a server has been."""
        found = []
        for folder, _, names in os.walk(self.folder):
            found += [os.path.relpath(os.path.join(folder, name), self.folder) for name in names]
        return sorted(set(found) - {".lock"})

    def test_the_folder_is_made_for_the_server_alone_and_must_be_of_use(self):
        with self.server() as server:
            self.assertEqual(stat.S_IMODE(os.stat(self.folder).st_mode), 0o700)
            self.assertEqual(server.stop(), 0)
        file = os.path.join(os.path.dirname(self.folder), "file")
        with open(file, "w", encoding="utf-8"):
            pass
        for path in (file, "/proc/self", os.path.join(file, "below")):
            result = run(f"--checkpoint_dir={path}")
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn(f"--checkpoint_dir '{path}' ", result.stderr)

    def test_restore_without_a_folder_is_a_mistake_in_the_command_line(self):
        result = run("--restore")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--checkpoint_dir", result.stderr)

    def test_without_a_folder_calls_are_refused(self):
        with LossdServer(LOSSD, *FLAGS) as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            self.assertFails(grpc.StatusCode.FAILED_PRECONDITION, "--checkpoint_dir", self.save, channel, "a")
            self.assertFails(grpc.StatusCode.FAILED_PRECONDITION, "--checkpoint_dir", self.restore, channel, "a")

    def test_names_that_lead_out_of_the_folder_are_refused(self):
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            for tag in ("", "..", "../x", ".drain", "a/b", "a\0b", "a" * 129):
                self.assertFails(grpc.StatusCode.INVALID_ARGUMENT, "tag", self.save, channel, tag)
                if tag:
                    self.assertFails(grpc.StatusCode.INVALID_ARGUMENT, "tag", self.restore, channel, tag)
            for head in ("..", "../../etc", ""):
                self.assertFails(grpc.StatusCode.INVALID_ARGUMENT, "head", self.restore, channel, "a", head)
            self.assertEqual(self.files(), [])

    def test_a_full_disk_is_told_and_leaves_what_was_there(self):
        """A limit on the size of files stands in for the disk: the system refuses the write all the same."""
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            self.save(channel, "a")
            before = self.files()
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (12000, resource.RLIM_INFINITY))
            create_head(channel, "h", VOCAB, HIDDEN, seed=2)
            self.assertFails(grpc.StatusCode.RESOURCE_EXHAUSTED, "heads/h/.tmp-a/tensor.weight", self.save, channel, "a")
            self.assertEqual(self.files(), before)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            self.assertEqual(self.restore(channel, "a").checkpoint.weight_version, 1)
            self.save(channel, "b")
            line, = (line for line in server.log().splitlines() if "a checkpoint could not be saved" in line)
            self.assertRegex(line, r'^\S+ E .* head="h" tag="a" reason=".*heads/h/.tmp-a/tensor.weight')

    def test_a_drain_that_fails_does_not_say_that_it_saved(self):
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            limit = VOCAB * HIDDEN * 4 - 1  # one byte less than the weights: room for the log
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            server.signal(15)
            self.assertEqual(server.wait(), 1)
            lines = [line for line in server.log().splitlines() if " E " in line]
            self.assertEqual(len(lines), 3, server.log())
            self.assertIn("a head could not be saved", lines[0])
            self.assertIn("the drain failed", lines[1])
            self.assertIn("heads=0 heads_failed=1", lines[1])
            self.assertIn("stopped after a drain that failed", lines[2])
            self.assertNotRegex(server.log(), r"(?m) I .*saved")
        self.assertNotIn("drain.json", self.files())

    def test_the_newest_of_each_prefix_are_kept(self):
        with self.server("--checkpoint_keep=2") as server, connect(server) as channel:
            for head in ("h", "other"):
                create_head(channel, head, VOCAB, HIDDEN)
            self.save(channel, "step-1", "other")
            # Those saved last are kept, whatever their numbers.
            for tag, deleted in (("step-1", []), ("best", []), ("step-30", []), ("best-1", []), ("step-2", ["step-1"]),
                                 ("step-3", ["step-30"]), ("step-30", ["step-2"])):
                self.assertEqual(list(self.save(channel, tag).deleted), deleted, tag)
            self.assertEqual(self.tags(channel, "h"), {"best", "best-1", "step-3", "step-30"})
            self.assertEqual(self.tags(channel, "other"), {"step-1"})
            server.await_log('head="h" tags=["step-2"] because_of="step-30"')
            server.stop()
        # The drain's own is neither counted nor deleted.
        with self.server("--checkpoint_keep=1", "--restore") as server, connect(server) as channel:
            self.assertEqual(list(self.save(channel, "step-40").deleted), ["step-30", "step-3"])
            self.assertEqual(self.tags(channel, "h"), {".drain", "best", "best-1", "step-40"})
            self.assertEqual(self.restore(channel, "step-40").checkpoint.tag, "step-40")
        for flags, words in ((["--checkpoint_keep=-1", f"--checkpoint_dir={self.folder}"], "--checkpoint_keep is -1"),
                             (["--checkpoint_keep=3"], "--checkpoint_dir")):
            result = run(*flags)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(words, result.stderr)

    def test_a_head_saves_itself_and_a_kill_at_any_moment_of_it_finds_the_newest_whole_one(self):
        """One step after the other with a save behind each, so that most kills hit one; the weights of a step are the same bits
        whenever it is restored."""
        adam = head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_ADAMW)
        weights = {}  # of each step, as the server had them
        for life in range(12):
            with self.server("--restore", "--checkpoint_steps=1") as server, connect(server) as channel:
                if life == 0:
                    create_head(channel, "h", VOCAB, HIDDEN, optimizer=adam)
                else:
                    head = self.head(channel)
                    self.assertEqual(self.weights(channel), weights[head.optimizer_steps])
                    self.assertEqual(head.steps_since_checkpoint, 0)
                    self.assertLessEqual(len(self.tags(channel, "h")), 3 + 1)  # one that a kill left before its oldest went
                session = open_session(channel, "h", f"c{life}")
                for sequence in range(1, 3 + life):
                    self.step(channel, session, sequence)
                    session.generation += 1
                    weights[self.head(channel).optimizer_steps] = self.weights(channel)
                if life == 0:  # there is one to go back to
                    server.wait_until(lambda: server.metric('lossd_step_checkpoints_total{outcome="ok"}') > 0, "a save")
                time.sleep(life % 4 * 0.001)
                server.signal(signal.SIGKILL)
                server.wait()

    def test_ranks_and_replicas_are_saved_by_themselves_too(self):
        flags = ["--checkpoint_steps=2", f"--checkpoint_dir={self.folder}"]
        ranks = lambda: LossdServer(LOSSD, "--devices=cpu,cpu", "--workspace_bytes=16777216", "--restore", *flags)
        adam = head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_ADAMW)

        def train(server, channel):
            """To step 4 of which the save is whole; its weights."""
            session = open_session(channel, "h", "c")
            while (head := self.head(channel)).optimizer_steps < 4:
                self.step(channel, session, head.optimizer_steps + 1)
                session.generation += 1
                # None is passed over.
                server.wait_until(lambda: self.head(channel).steps_since_checkpoint < 2, "the save")
            self.assertEqual(self.head(channel).steps_since_checkpoint, 0)
            return self.weights(channel)

        with ranks() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN, optimizer=adam)
            saved = train(server, channel)
            server.signal(signal.SIGKILL)
            server.wait()
        with ranks() as server, connect(server) as channel:
            self.assertEqual(self.weights(channel), saved)
            head_pb2_grpc.HeadServiceStub(channel).DeleteHead(head_pb2.DeleteHeadRequest(name="h", discard_gradient=True))
        with ReplicaSet(LOSSD, 2, *FLAGS, *flags) as servers, connect(servers[0]) as channel:
            create_head(channel, "h", VOCAB, HIDDEN, optimizer=adam)
            saved = train(servers[0], channel)
            self.assertEqual(self.restore(channel, "auto-4").checkpoint.optimizer_steps, 4)
            self.assertEqual(self.weights(channel), saved)

    def step(self, channel, session, sequence):
        add_chunks(channel, session, [sequence])
        head = self.head(channel)
        return gradient_pb2_grpc.GradientServiceStub(channel).ApplyStep(gradient_pb2.ApplyStepRequest(
            head="h", generation=head.generation, marks=head.sessions, learning_rate=0.01))

    def weights(self, channel):
        request = head_pb2.ReadWeightsRequest(head="h", rows=VOCAB, dtype=types_pb2.DATA_TYPE_FLOAT32)
        return b"".join(piece.weights for piece in head_pb2_grpc.HeadServiceStub(channel).ReadWeights(request))

    def test_a_save_by_itself_that_fails_is_told_and_the_next_is_tried(self):
        with self.server("--checkpoint_steps=1") as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN, optimizer=head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_SGD))
            session = open_session(channel, "h", "c")
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (12000, resource.RLIM_INFINITY))
            self.step(channel, session, 1)
            server.await_log("a save of --checkpoint_steps failed")
            self.assertRegex(server.log(), r' E .*head="h" tag="auto-1" reason=".*heads/h/.tmp-auto-1/')
            self.assertEqual(server.metric('lossd_step_checkpoints_total{outcome="failed"}'), 1)
            self.assertEqual(server.metric('lossd_head_steps_since_checkpoint{head="h"}'), 1)
            self.assertEqual(server.metric("lossd_checkpoint_interval_steps"), 1)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            session.generation += 1
            self.step(channel, session, 2)
            server.wait_until(lambda: server.metric('lossd_head_steps_since_checkpoint{head="h"}') == 0, "the next save")
            self.assertEqual(self.tags(channel, "h"), {"auto-2"})

    def test_checkpoint_steps_that_cannot_be_meant_are_a_mistake_in_the_command_line(self):
        folder = f"--checkpoint_dir={self.folder}"
        for flags, words in ((["--checkpoint_steps=-1", folder], "--checkpoint_steps is -1"),
                             (["--checkpoint_steps=10"], "it needs --checkpoint_dir"),
                             (["--checkpoint_steps=ten", folder], "checkpoint_steps"),
                             (["--checkpoint_steps=99999999999999999999", folder], "checkpoint_steps")):
            result = run(*flags)
            self.assertNotEqual(result.returncode, 0, flags)
            self.assertIn(words, result.stderr)
        with self.server("--checkpoint_steps=9223372036854775807", "--restore"):
            pass

    def tags(self, channel, head):
        listed = head_pb2_grpc.HeadServiceStub(channel).ListCheckpoints(head_pb2.ListCheckpointsRequest(head=head))
        return {checkpoint.tag for checkpoint in listed.checkpoints}

    def delete(self, channel, tag, head="h"):
        return head_pb2_grpc.HeadServiceStub(channel).DeleteCheckpoint(
            head_pb2.DeleteCheckpointRequest(head=head, tag=tag))

    def test_a_checkpoint_is_deleted_for_good_and_no_other(self):
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            self.save(channel, "a")
            self.save(channel, "b")  # shares the weights with it
            deleted = self.delete(channel, "a")
            self.assertEqual((deleted.checkpoint.tag, deleted.checkpoint.weight_version), ("a", 1))
            self.assertGreater(deleted.bytes_freed, 0)
            self.assertFails(grpc.StatusCode.NOT_FOUND, "'a'", self.restore, channel, "a")
            self.assertFails(grpc.StatusCode.NOT_FOUND, "'a'", self.delete, channel, "a")
            for tag in ("", "..", ".drain", "a/b"):
                self.assertFails(grpc.StatusCode.INVALID_ARGUMENT, "tag", self.delete, channel, tag)
            self.assertFails(grpc.StatusCode.INVALID_ARGUMENT, "head", self.delete, channel, "a", "../heads")
            self.assertEqual(self.restore(channel, "b").checkpoint.tag, "b")
            # A damaged one, too.
            os.truncate(os.path.join(self.folder, "heads/h/b/manifest.json"), 10)
            self.assertFails(grpc.StatusCode.DATA_LOSS, "manifest.json", self.restore, channel, "b")
            self.delete(channel, "b")
            self.assertEqual(self.tags(channel, "h"), set())
        with LossdServer(LOSSD, *FLAGS) as server, connect(server) as channel:
            self.assertFails(grpc.StatusCode.FAILED_PRECONDITION, "--checkpoint_dir", self.delete, channel, "a")

    def test_damage_is_found_at_start_and_by_calls_and_changes_nothing(self):
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            session = open_session(channel, "h", "k")
            add_chunks(channel, session, range(1, 4))
            self.save(channel, "a")
            for name in self.files():
                path = os.path.join(self.folder, name)
                with open(path, "r+b") as file:
                    content = bytearray(file.read())
                    content[len(content) // 2] ^= 0x10
                    file.seek(0)
                    file.write(content)
                self.assertFails(grpc.StatusCode.DATA_LOSS, name, self.restore, channel, "a")
                self.assertEqual(self.head(channel).window_tokens, 24)
                content[len(content) // 2] ^= 0x10
                with open(path, "r+b") as file:
                    file.write(content)
            os.truncate(os.path.join(self.folder, "heads/h/a/tensor.weight"), 100)
        result = run(f"--checkpoint_dir={self.folder}", "--restore")
        self.assertEqual(result.returncode, 1)
        self.assertIn("heads/h/a/tensor.weight", result.stderr)
        self.assertIn("remove", result.stderr)

    def test_a_head_of_the_configuration_must_be_what_was_restored(self):
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            self.save(channel, "a")
        config = os.path.join(os.path.dirname(self.folder), "config.json")
        entry = {"name": "h", "vocab_size": VOCAB, "hidden_size": HIDDEN, "weight_dtype": "float32"}
        with open(config, "w", encoding="utf-8") as file:
            json.dump({"heads": [entry]}, file)
        with self.server("--restore", f"--config={config}") as server, connect(server) as channel:
            self.assertGreater(self.head(channel).weight_version, 1)
        with open(config, "w", encoding="utf-8") as file:
            json.dump({"heads": [{**entry, "hidden_size": 8}]}, file)
        result = run("--restore", f"--checkpoint_dir={self.folder}", f"--config={config}")
        self.assertEqual(result.returncode, 1)
        self.assertIn("head h exists as [200, 16]", result.stderr)

    def drained(self, end):
        """Ends a server with three chunks in a window; returns its incarnation and the session."""
        with self.server("--restore") as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            session = open_session(channel, "h", "k")
            self.assertEqual(add_chunks(channel, session, range(1, 4)), 3)
            end(server, channel)
            self.assertEqual(server.wait(), 0)
            self.assertIn("saved the heads for the next server", server.log())
        self.assertIn("drain.json", self.files())
        return session

    def test_a_drained_server_is_continued_once(self):
        session = self.drained(lambda server, _: server.signal(15))
        with self.server("--restore") as server, connect(server) as channel:
            server.await_log("going on where the last server was drained")
            self.assertNotIn("drain.json", self.files())
            again = open_session(channel, "h", "k")
            self.assertEqual((again.session_id, again.incarnation, again.restores),
                             (session.session_id, session.incarnation, 0))
            self.assertEqual([(mark.accepted, mark.applied) for mark in again.lanes], [(3, 3)])
            self.assertEqual(add_chunks(channel, session, range(2, 6)), 5)  # 2 and 3 are repeats
            self.assertEqual(self.head(channel).window_tokens, 40)
            server.signal(9)
            server.wait()
        with self.server("--restore") as server, connect(server) as channel:
            again = open_session(channel, "h", "k")
            self.assertEqual(again.session_id, session.session_id)
            self.assertNotEqual(again.incarnation, session.incarnation)
            self.assertEqual(([mark.accepted for mark in again.lanes], again.restores), ([3], 1))

    def test_a_head_of_the_configuration_stays_parked_over_a_drain(self):
        config = os.path.join(os.path.dirname(self.folder), "config.json")
        with open(config, "w", encoding="utf-8") as file:
            json.dump({"heads": [{"name": "h", "vocab_size": VOCAB, "hidden_size": HIDDEN, "weight_dtype": "float32"}]}, file)
        flags = (f"--config={config}", "--parking_bytes=1M", "--restore")
        with self.server(*flags) as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            head_pb2_grpc.HeadServiceStub(channel).ParkHead(head_pb2.ParkHeadRequest(name="h"))
            self.assertEqual(server.stop(), 0)
        with self.server(*flags) as server, connect(server) as channel:
            self.assertEqual(self.head(channel).parked_bytes, VOCAB * HIDDEN * 4)
            self.save(channel, "back")
            self.assertEqual(self.head(channel).parked_bytes, 0)
            self.assertEqual(self.head(channel).weight_version, 1)

    def test_the_drain_call_does_what_sigterm_does(self):
        self.drained(lambda server, channel: status_pb2_grpc.StatusServiceStub(channel).Drain(status_pb2.DrainRequest()))

    def test_a_start_that_fails_leaves_the_drain_to_the_next(self):
        self.drained(lambda server, _: server.signal(15))
        with LossdServer(LOSSD, *FLAGS) as other:
            result = run(f"--listen={other.target}", "--restore", f"--checkpoint_dir={self.folder}")
            self.assertEqual(result.returncode, 1)
            self.assertIn("cannot listen", result.stderr)
        self.assertIn("drain.json", self.files())

    def test_a_start_without_restore_does_not_take_the_place_of_a_drain(self):
        session = self.drained(lambda server, _: server.signal(15))
        result = run(f"--checkpoint_dir={self.folder}")
        self.assertEqual(result.returncode, 1)
        self.assertIn("--restore", result.stderr)
        self.assertIn("drain.json", self.files())
        os.remove(os.path.join(self.folder, "drain.json"))
        with self.server() as server, connect(server) as channel:
            self.assertEqual(len(head_pb2_grpc.HeadServiceStub(channel).ListHeads(head_pb2.ListHeadsRequest()).heads), 0)
            # What was drained can still be had: it is the newest.
            restored = self.restore(channel, "")
            self.assertEqual(restored.checkpoint.window_tokens, 24)
            self.assertEqual(open_session(channel, "h", "k").session_id, session.session_id)

    def test_a_server_without_heads_leaves_what_others_saved_to_the_next(self):
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            self.save(channel, "kept")
            server.signal(9)
            server.wait()
        with self.server() as server:
            server.signal(15)
            self.assertEqual(server.wait(), 0)
        self.assertNotIn("drain.json", self.files())
        with self.server("--restore") as server, connect(server) as channel:
            self.assertEqual(self.head(channel).weight_version > 0, True)

    def test_a_port_file_that_cannot_be_written_leaves_the_drain_to_the_next(self):
        self.drained(lambda server, _: server.signal(15))
        pipe = os.path.join(os.path.dirname(self.folder), "pipe")
        os.mkfifo(pipe)
        for path in ("/nowhere/ports", pipe, self.folder):
            result = run(f"--checkpoint_dir={self.folder}", "--restore", f"--port_file={path}")
            self.assertEqual(result.returncode, 1)
            self.assertIn("--port_file", result.stderr)
            self.assertIn("drain.json", self.files(), path)

    def test_a_port_file_on_a_full_disk_leaves_the_drain_to_the_next(self):
        """A limit on the size of files stands in for the disk."""
        session = self.drained(lambda server, _: server.signal(15))
        folder = os.path.dirname(self.folder)
        before = sorted(os.listdir(folder))
        result = run("--restore", f"--checkpoint_dir={self.folder}", f"--port_file={folder}/ports",
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)))
        self.assertEqual(result.returncode, 1)
        self.assertIn("--port_file", result.stderr)
        self.assertNotIn("serving", result.stderr)
        self.assertEqual(sorted(os.listdir(folder)), before)
        with self.server("--restore") as server, connect(server) as channel:
            again = open_session(channel, "h", "k")
            self.assertEqual((again.session_id, again.incarnation, again.restores),
                             (session.session_id, session.incarnation, 0))
            self.assertEqual([(mark.accepted, mark.applied) for mark in again.lanes], [(3, 3)])
            self.assertEqual(add_chunks(channel, session, range(2, 6)), 5)

    def test_flushes_and_steps_are_refused_while_the_server_drains(self):
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            session = open_session(channel, "h", "k")
            add_chunks(channel, session, range(1, 4))
            marks = self.head(channel).sessions
            drain = status_pb2_grpc.StatusServiceStub(channel)
            flush = gradient_pb2_grpc.GradientServiceStub(channel)
            drain.Drain(status_pb2.DrainRequest())
            with self.assertRaises(grpc.RpcError) as caught:
                flush.BeginFlush(gradient_pb2.BeginFlushRequest(head="h", generation=1, marks=marks))
            # Refused by the head, or by a server that has stopped listening.
            self.assertIn(caught.exception.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))
            self.assertEqual(server.wait(), 0)
        with self.server("--restore") as server, connect(server) as channel:
            self.assertEqual(self.head(channel).window_tokens, 24)
            gradient_pb2_grpc.GradientServiceStub(channel).BeginFlush(
                gradient_pb2.BeginFlushRequest(head="h", generation=1, marks=marks))

    def test_lossctl_saves_lists_and_restores(self):
        def lossctl(*arguments):
            return programs.run(LOSSCTL, *arguments, "--server", server.target)
        with self.server() as server, connect(server) as channel:
            create_head(channel, "h", VOCAB, HIDDEN)
            self.assertIn("No checkpoints", lossctl("checkpoint", "list").stdout)
            self.assertIn("Saved head 'h' as 'a': generation 1, step 0, 0 tokens",
                          lossctl("checkpoint", "save", "h", "a").stdout)
            saved = json.loads(lossctl("checkpoint", "save", "h", "b", "--json").stdout)
            self.assertEqual((saved["tag"], saved["weight_version"]), ("b", 1))
            self.assertLess(saved["bytes_written"], saved["bytes"])
            listed = json.loads(lossctl("checkpoint", "list", "h", "--json").stdout)["checkpoints"]
            self.assertEqual([entry["tag"] for entry in listed], ["b", "a"])
            self.assertRegex(lossctl("checkpoint", "list").stdout, r"(?m)^h +a +\d{4}-\d\d-\d\dT.* +1 +0 +0 ")
            self.assertIn("Head 'h' is what 'b' is", lossctl("checkpoint", "restore", "h").stdout)
            self.assertIn("Deleted checkpoint 'a' of head 'h': ", lossctl("checkpoint", "delete", "h", "a").stdout)
            deleted = json.loads(lossctl("checkpoint", "delete", "h", "b", "--json").stdout)
            self.assertEqual((deleted["head"], deleted["tag"], deleted["bytes_freed"] > 0), ("h", "b", True))
            self.assertEqual(lossctl("checkpoint", "delete", "h", "b").returncode, 3)
            missing = lossctl("checkpoint", "restore", "h", "c")
            self.assertEqual(missing.returncode, 3)
            self.assertIn("checkpoint list", missing.stderr)


if __name__ == "__main__":
    unittest.main()
