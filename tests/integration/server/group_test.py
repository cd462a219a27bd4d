#!/usr/bin/python3
"""--devices with more than one device: processes that are one daemon. What happens when one of them dies, stops or is
told something, and how they start.

usage: group_test.py LOSSD

Nothing here is late: the limits of waits guard against hangs alone.
"""
import concurrent.futures
import contextlib
import glob
import json
import os
import pathlib
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import unittest

import grpc
import numpy as np
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, status_pb2, status_pb2_grpc
from lossd_server import LossdServer, free_port
from programs import Program, run
from standard_services import SERVING, health
from waiting import wait_until

from group_support import epochs, list_heads, read_weights, runs
from streaming import F32, create_head, in_flight, write_weights

BINARY = sys.argv.pop(1)
FLAGS = ("--workspace_bytes=16M", "--drain_timeout=10m", "--rank_timeout=3s")


def await_serving(server, epoch):
    """Until the epoch of this number serves; its processes by rank."""
    server.await_log(" serving version=", epoch)
    return epochs(server.log())[epoch - 1]


def virtual_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="utf-8") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def threads(pid):
    """The names of its threads."""
    paths = glob.glob(f"/proc/{pid}/task/*/comm")
    return sorted(pathlib.Path(path).read_text(encoding="utf-8").strip() for path in paths)


class TestCase(unittest.TestCase):
    def setUp(self):
        """Temporary files of the servers go to a folder that a test can look into."""
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = self.folder
        self.addCleanup(lambda: os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before))

    def group(self, *flags, devices="cpu,cpu"):
        return LossdServer(BINARY, f"--devices={devices}", *FLAGS, *flags)

    def left(self):
        """What the servers have left of their sockets."""
        return glob.glob(os.path.join(self.folder, "lossd-group-*"))

    def assert_ends(self, server, status, pids):
        self.assertEqual(server.wait(), status, server.log())
        self.assertEqual([pid for pid in pids if runs(pid)], [])
        self.assertEqual(self.left(), [])


class Together(TestCase):
    def test_processes_are_one_daemon(self):
        with self.group(devices="cpu,cpu,cpu") as server:
            pids = await_serving(server, 1)
            self.assertEqual(len(pids), 3)
            self.assertTrue(all(map(runs, pids)))
            with grpc.insecure_channel(server.target) as channel:
                self.assertEqual(health(channel), SERVING)
            self.assertEqual(list(list_heads(server.target)), [])
            # The parent forks: it has no threads but the one that writes the log, which takes no signals.
            self.assertEqual(threads(server.pid), ["log", "lossd"])
            wait_until(lambda: not self.left())  # the socket of a group that is whole is nobody's any more
            self.assertEqual(server.stop(), 0)
            self.assert_ends(server, 0, pids)
            self.assertEqual(len(epochs(server.log())), 1)

    def test_lines_name_their_rank_and_those_of_the_parent_none(self):
        with self.group("--log_format=json") as server:
            self.assertEqual(server.stop(), 0)
            lines = [json.loads(line) for line in server.log().splitlines()]
        ranks = {line["event"]: line.get("rank") for line in lines}
        self.assertEqual(ranks["started the ranks of a group"], None)
        self.assertEqual((ranks["serving"], ranks["stopped"], ranks["ready"]), (0, 0, 1))
        with self.group() as server:
            self.assertEqual(server.stop(), 0)
            self.assertRegex(server.log(), r" serving version=.* rank=0\n")
            self.assertRegex(server.log(), r" ready device=.* rank=1\n")

    def test_one_device_is_no_group(self):
        with LossdServer(BINARY, "--devices=cpu", *FLAGS) as server:
            self.assertEqual(list(list_heads(server.target)), [])
            self.assertEqual(epochs(server.log()), [])
            self.assertEqual(server.stop(), 0)

    def test_devices_may_come_from_the_file(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"devices": "cpu,cpu", "rank_timeout": "4s", "group_start_timeout": "2m"}, file)
            file.flush()
            with LossdServer(BINARY, f"--config={file.name}") as server:
                self.assertEqual(len(await_serving(server, 1)), 2)
                self.assertEqual(server.stop(), 0)

    def test_calls_that_wait_for_all_ranks_may_be_as_many_as_there_are_clients(self):
        """Each waits for what the other rank answers. Nothing that the answer needs may wait for such a call."""
        clients = 16
        with self.group() as server:
            pids = await_serving(server, 1)

            def work(number):
                with grpc.insecure_channel(server.target) as channel:
                    create_head(channel, f"head-{number}", 64, 8)
                    losses = loss_pb2_grpc.LossServiceStub(channel)
                    losses.OpenSession(loss_pb2.OpenSessionRequest(head=f"head-{number}", client_key="c", deterministic=True))

            with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                list(pool.map(work, range(clients)))
            self.assertEqual(len(list_heads(server.target)), clients)
            self.assertEqual(epochs(server.log()), [pids])
            self.assertEqual(server.stop(), 0)

    def test_heads_are_copied_and_averaged_by_all_ranks(self):
        with self.group(devices="cpu,cpu,cpu") as server:
            pids = await_serving(server, 1)
            with grpc.insecure_channel(server.target) as channel:
                heads = head_pb2_grpc.HeadServiceStub(channel)

                def weights(head):
                    return np.frombuffer(read_weights(channel, head), np.float32)

                create_head(channel, "h", 1000, 24, optimizer=head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_ADAM))
                first = weights("h")
                for frozen, name in ((True, "average"), (False, "branch")):
                    copy = heads.CopyHead(head_pb2.CopyHeadRequest(source="h", name=name, frozen=frozen, copy_id=name))
                    self.assertEqual(copy.weight_version, 1)
                write_weights(channel, "h", 1000, 24, seed=2)
                self.assertTrue(np.array_equal(weights("average"), first))
                self.assertTrue(np.array_equal(weights("branch"), first))
                request = head_pb2.BlendHeadRequest(head="average", source="h", decay=0.75, blend_id="1")
                self.assertEqual([heads.BlendHead(request).weight_version for _ in range(2)], [2, 2])
                expected = first + np.float32(0.25) * (weights("h") - first)
                self.assertTrue(np.array_equal(weights("average"), expected))
                heads.DeleteHead(head_pb2.DeleteHeadRequest(name="h"))
                self.assertTrue(np.array_equal(weights("branch"), first))
            self.assertEqual(epochs(server.log()), [pids])
            self.assertEqual(server.stop(), 0)

    def test_a_head_of_all_ranks_is_parked_and_comes_back(self):
        with self.group("--parking_bytes=64MiB", devices="cpu,cpu,cpu") as server:
            pids = await_serving(server, 1)
            with grpc.insecure_channel(server.target) as channel:
                heads = head_pb2_grpc.HeadServiceStub(channel)
                create_head(channel, "h", 1000, 24, optimizer=head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_ADAM))
                weights = read_weights(channel, "h")
                parked = heads.ParkHead(head_pb2.ParkHeadRequest(name="h")).head
                self.assertEqual(parked.parked_bytes, 1000 * 24 * 4 * 3)
                self.assertEqual(list(parked.memory), [])
                clients = 16

                def there():
                    try:
                        return read_weights(channel, "h")
                    except grpc.RpcError as error:
                        self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)

                def read(_):
                    """As libraries do: asks again until it is there."""
                    return wait_until(there, "the weights of a head that is parked", every=0)

                with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                    self.assertEqual(list(pool.map(read, range(clients))), [weights] * clients)
                self.assertEqual(heads.GetHead(head_pb2.GetHeadRequest(name="h")).parked_bytes, 0)
            self.assertEqual(epochs(server.log()), [pids])
            self.assertEqual(server.stop(), 0)

    def test_a_rank_without_more_memory_refuses_heads_and_takes_weights(self):
        with self.group("--checkpoint_dir=" + os.path.join(self.folder, "checkpoints")) as server:
            pids = await_serving(server, 1)
            with grpc.insecure_channel(server.target) as channel:
                heads = head_pb2_grpc.HeadServiceStub(channel)
                create_head(channel, "h", 65536, 64)
                for weightless in ("saved", "read"):
                    config = head_pb2.HeadConfig(name=weightless, vocab_size=65536, hidden_size=64, weight_dtype=F32)
                    heads.CreateHead(head_pb2.CreateHeadRequest(config=config))
                weights = read_weights(channel, "h")
                if virtual_bytes(pids[1]) > 1 << 40:
                    self.skipTest("a sanitizer, which ends a process that gets no memory")
                most = virtual_bytes(pids[1]) + (4 << 20)  # of 8 MiB that its part has
                resource.prlimit(pids[1], resource.RLIMIT_AS, (most, most))
                for _ in range(3):
                    with self.assertRaises(grpc.RpcError) as refused:
                        create_head(channel, "more", 65536, 64)
                    self.assertEqual(refused.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
                    self.assertIn("rank 1: ", refused.exception.details())
                self.assertEqual(read_weights(channel, "h"), weights)
                for seed in (2, 3):
                    write_weights(channel, "h", 65536, 64, seed)
                    self.assertNotEqual(read_weights(channel, "h"), weights)
                    weights = read_weights(channel, "h")
                heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="full"))
                heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="saved", tag="weightless"))
                write_weights(channel, "read", 65536, 64)
                write_weights(channel, "h", 65536, 64, seed=4)
                heads.RestoreCheckpoint(head_pb2.RestoreCheckpointRequest(head="h", tag="full"))
                self.assertEqual(read_weights(channel, "h"), weights)
            self.assertEqual(epochs(server.log()), [pids])
            self.assertEqual(server.stop(), 0)

    def test_a_full_disk_is_told_and_the_group_goes_on(self):
        """A limit on the size of files stands in for the disk: the system refuses the write all the same."""
        with self.group("--checkpoint_dir=" + os.path.join(self.folder, "checkpoints")) as server:
            pids = await_serving(server, 1)
            with grpc.insecure_channel(server.target) as channel:
                heads = head_pb2_grpc.HeadServiceStub(channel)
                create_head(channel, "h", 4096, 64)
                heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="a"))
                weights = read_weights(channel, "h")
                resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
                write_weights(channel, "h", 4096, 64, seed=2)
                with self.assertRaises(grpc.RpcError) as refused:
                    heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="b"))
                self.assertEqual(refused.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
                self.assertIn("heads/h/.tmp-b/tensor.weight", refused.exception.details())
                heads.RestoreCheckpoint(head_pb2.RestoreCheckpointRequest(head="h"))
                self.assertEqual(read_weights(channel, "h"), weights)
                resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="b"))
            server.await_log("a checkpoint could not be saved")
            self.assertEqual(epochs(server.log()), [pids])
            self.assertEqual(server.stop(), 0)

    def test_strangers_at_the_socket_while_a_group_starts_change_nothing(self):
        over = threading.Event()
        heard = []

        def shout():
            while not over.is_set():
                for path in glob.glob(os.path.join(self.folder, "lossd-group-*", "control.sock")):
                    self.assertEqual(os.stat(os.path.dirname(path)).st_mode & 0o777, 0o700)
                    with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
                        stranger.settimeout(0.2)
                        stranger.connect(path)
                        heard.append(path)
                        stranger.sendall(os.urandom(4096))
                        stranger.recv(1)
                time.sleep(0.005)

        shouting = threading.Thread(target=shout)
        shouting.start()
        self.addCleanup(shouting.join)
        self.addCleanup(over.set)
        with self.group() as server:
            pids = await_serving(server, 1)
            self.assertEqual(server.stop(), 0)
            self.assert_ends(server, 0, pids)
        self.assertTrue(heard)


class Ends(TestCase):
    def test_a_drain_by_call_ends_the_program(self):
        with self.group() as server, grpc.insecure_channel(server.target) as channel:
            pids = await_serving(server, 1)
            status_pb2_grpc.StatusServiceStub(channel).Drain(status_pb2.DrainRequest())
            self.assert_ends(server, 0, pids)

    def test_a_signal_of_the_terminal_reaches_the_parent_and_drains(self):
        with LossdServer(BINARY, "--devices=cpu,cpu", *FLAGS, start_new_session=True) as server:
            pids = await_serving(server, 1)
            os.killpg(server.pid, signal.SIGINT)
            self.assert_ends(server, 0, pids)
            self.assertIn("stopped chunks=0 rank=0", server.log())

    def test_a_signal_to_every_process_is_one_signal(self):
        with self.group() as server:
            pids = await_serving(server, 1)
            for pid in [*pids, server.pid]:  # as systemd does
                os.kill(pid, signal.SIGTERM)
            self.assert_ends(server, 0, pids)
            self.assertIn("stopped chunks=0 rank=0", server.log())

    def test_sigterm_to_a_rank_alone_is_ignored(self):
        with self.group() as server:
            pids = await_serving(server, 1)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)
            self.assertEqual(list(list_heads(server.target)), [])
            self.assertEqual(server.stop(), 0)
            self.assertEqual(len(epochs(server.log())), 1)

    def test_a_second_signal_ends_it_at_once(self):
        with self.group("--rank_timeout=10m") as server:
            pids = await_serving(server, 1)
            os.kill(pids[0], signal.SIGSTOP)  # a drain that does not end

            def ended():  # signals that come together are one
                server.signal(signal.SIGTERM)
                return not server.running()

            wait_until(ended, "the end of the server", every=0.1)
            self.assert_ends(server, -signal.SIGTERM, pids)

    def test_a_signal_while_it_starts_ends_it_in_order(self):
        server = self.group()
        self.addCleanup(server.close)
        server.begin()
        server.wait_until(lambda: epochs(server.log()), "the ranks are started")
        self.assertEqual(server.stop(), 0, server.log())
        self.assertEqual([pid for pid in epochs(server.log())[0] if runs(pid)], [])

    def test_hang_up_goes_to_every_rank(self):
        with self.group("--lanes_at_ranks=true", devices="cpu,cpu,cpu") as server:
            await_serving(server, 1)
            server.signal(signal.SIGHUP)
            for rank in range(3):
                server.await_log(f"told to read files again tls=false tokens=false rank={rank}")
            self.assertEqual(server.stop(), 0)

    def test_nothing_survives_the_parent(self):
        with self.group(devices="cpu,cpu,cpu") as server:
            pids = await_serving(server, 1)
            wait_until(lambda: not self.left())
            server.signal(signal.SIGKILL)
            server.wait()
            wait_until(lambda: not any(map(runs, pids)))


class Loss(TestCase):
    def test_after_the_death_of_any_rank_all_are_new_at_the_same_ports(self):
        with self.group("--checkpoint_dir=" + os.path.join(self.folder, "checkpoints"), "--restore",
                        "--health_listen=127.0.0.1:0", devices="cpu,cpu,cpu") as server:
            dead = []
            for rank in range(3):
                before = await_serving(server, rank + 1)
                os.kill(before[rank], signal.SIGKILL)
                after = await_serving(server, rank + 2)
                self.assertEqual(list(list_heads(server.target)), [])
                with grpc.insecure_channel(server.health_target) as channel:
                    self.assertEqual(health(channel), SERVING)
                server.await_log(f"a rank died epoch={rank + 1} of_rank={rank} device=\"cpu\" signal=9")
                dead += before
                self.assertEqual([pid for pid in dead if runs(pid)], [])
                self.assertTrue(all(map(runs, after)))
            self.assertEqual(server.log().count("there are no checkpoints to restore"), 4)
            self.assertEqual(server.stop(), 0)
            self.assert_ends(server, 0, after)

    def test_a_parent_may_be_killed_and_started_again_at_once(self):
        """Its ranks die with it, but hold its folder and its port until the system has their memory back."""
        flags = ("--checkpoint_dir=" + os.path.join(self.folder, "checkpoints"), f"--listen=127.0.0.1:{free_port()}",
                 "--restore", "--memory_limit_bytes=4G", "--rank_timeout=10m")
        config = head_pb2.HeadConfig(name="large", vocab_size=131072, hidden_size=1024, weight_dtype=F32)  # 1 GiB
        with contextlib.ExitStack() as servers:
            for _ in range(2):
                server = servers.enter_context(self.group(*flags))
                with grpc.insecure_channel(server.target) as channel:
                    head_pb2_grpc.HeadServiceStub(channel).CreateHead(head_pb2.CreateHeadRequest(config=config))
                server.signal(signal.SIGKILL)
            server = servers.enter_context(self.group(*flags))
            pids = await_serving(server, 1)
            self.assertEqual(server.stop(), 0)
            self.assertEqual([pid for pid in pids if runs(pid)], [])

    def test_heads_come_back_as_their_newest_checkpoints_have_them(self):
        with self.group("--checkpoint_dir=" + os.path.join(self.folder, "checkpoints"), "--restore") as server:
            pids = await_serving(server, 1)
            with grpc.insecure_channel(server.target) as channel:
                create_head(channel, "h", 97, 6)
                heads = head_pb2_grpc.HeadServiceStub(channel)
                heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="a-1"))
                weights = read_weights(channel, "h")
            self.assertEqual(len(weights), 97 * 6 * 4)
            self.assertTrue(any(weights))
            for epoch in (2, 3):
                os.kill(pids[1], signal.SIGKILL)
                pids = await_serving(server, epoch)
                with grpc.insecure_channel(server.target) as channel:
                    self.assertEqual(read_weights(channel, "h"), weights)
            self.assertEqual(server.stop(), 0)
            self.assert_ends(server, 0, pids)

    def test_without_restore_nothing_of_the_folder_comes_back(self):
        """It may be of another run, whose weights nobody has asked for."""
        with self.group("--checkpoint_dir=" + os.path.join(self.folder, "checkpoints")) as server:
            pids = await_serving(server, 1)
            with grpc.insecure_channel(server.target) as channel:
                create_head(channel, "h", 97, 6)
                head_pb2_grpc.HeadServiceStub(channel).SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="a-1"))
            os.kill(pids[1], signal.SIGKILL)
            await_serving(server, 2)
            self.assertEqual(list(list_heads(server.target)), [])
            self.assertEqual(server.stop(), 0)

    def test_a_loss_after_a_drain_by_call_is_the_end(self):
        with self.group("--rank_timeout=10m") as server, grpc.insecure_channel(server.target) as channel:
            pids = await_serving(server, 1)
            create_head(channel, "h", 97, 6)
            os.kill(pids[1], signal.SIGSTOP)  # what the drain waits for
            weights = head_pb2_grpc.HeadServiceStub(channel).ReadWeights(head_pb2.ReadWeightsRequest(head="h", dtype=F32))
            wait_until(lambda: in_flight(server.metrics_url, "HeadService/ReadWeights") == 1)
            status_pb2_grpc.StatusServiceStub(channel).Drain(status_pb2.DrainRequest())
            server.await_log(" draining")
            os.kill(pids[1], signal.SIGKILL)
            self.assert_ends(server, 1, pids)
            self.assertEqual(len(epochs(server.log())), 1)
            weights.cancel()

    def test_who_has_children_ignored_may_start_a_group(self):
        """SIG_IGN of SIGCHLD stays over an exec; the ends of children could then not be waited for."""
        ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
        with Program(sys.executable, "-c", ignoring, BINARY, "--devices=cpu,cpu", "--listen=127.0.0.1:0", "--metrics_listen=",
                     *FLAGS, log=os.path.join(self.folder, "log")) as server:
            os.kill(await_serving(server, 1)[1], signal.SIGKILL)
            await_serving(server, 2)
            self.assertEqual(server.stop(), 0)

    def test_a_rank_that_stops_is_lost_and_never_comes_back(self):
        for rank, why in [(1, r"rank 1 was lost: it was silent for 2s"), (0, r"the leader \(rank 0\) was lost")]:
            with self.group("--rank_timeout=2s") as server:
                before = await_serving(server, 1)
                os.kill(before[rank], signal.SIGSTOP)
                after = await_serving(server, 2)
                self.assertRegex(server.log(), why)
                self.assertEqual([pid for pid in before if runs(pid)], [])
                with self.assertRaises(ProcessLookupError):
                    os.kill(before[rank], signal.SIGCONT)
                self.assertEqual(list(list_heads(server.target)), [])
                self.assertEqual(server.stop(), 0)
                self.assert_ends(server, 0, after)

    def test_a_rank_that_dies_while_the_group_ends_is_an_error(self):
        with self.group("--rank_timeout=10m") as server:
            pids = await_serving(server, 1)
            os.kill(pids[0], signal.SIGSTOP)
            server.signal(signal.SIGTERM)
            server.await_log("told to end signal=15")
            os.kill(pids[1], signal.SIGKILL)
            self.assert_ends(server, 1, pids)
            self.assertIn("the group was lost while it ended", server.log())

    def test_one_epoch_after_the_other_that_dies_at_once_is_given_up(self):
        with self.group() as server:
            seen = []
            for epoch in range(1, 6):
                pids = await_serving(server, epoch)
                seen += pids
                os.kill(pids[1], signal.SIGKILL)
            self.assert_ends(server, 1, seen)
            self.assertIn("gave up", server.log())
            self.assertEqual(len(epochs(server.log())), 5)


class Starts(TestCase):
    def assert_no_start(self, result, status, *words):
        self.assertEqual(result.returncode, status, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        started = epochs(result.stderr)
        self.assertLessEqual(len(started), 1)
        self.assertEqual([pid for pids in started for pid in pids if runs(pid)], [])
        self.assertEqual(self.left(), [])

    def test_an_error_of_a_start_ends_it_with_its_status(self):
        with LossdServer(BINARY, "--device=cpu") as other:
            result = run(BINARY, "--devices=cpu,cpu", f"--listen={other.target}", "--metrics_listen=", *FLAGS)
            self.assert_no_start(result, 1, "cannot listen on", other.target)
        result = run(BINARY, "--devices=cpu,cpu", "--listen=127.0.0.1", "--metrics_listen=")
        self.assert_no_start(result, 2, "--listen")

    def test_devices_that_are_not_there_are_an_error_that_says_so(self):
        none = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        result = run(BINARY, "--devices=cuda:0,cuda:1", "--listen=127.0.0.1:0", "--metrics_listen=", env=none)
        self.assert_no_start(result, 1, "cuda:")
        self.assert_no_start(run(BINARY, "--devices=all", env=none), 2, "'all'", "no CUDA device")

    def test_a_rank_that_does_not_come_ends_the_start(self):
        server = LossdServer(BINARY, "--devices=cpu,cpu", "--group_start_timeout=2s", "--rank_timeout=2s")
        self.addCleanup(server.close)
        server.begin()
        server.wait_until(lambda: epochs(server.log()), "the ranks are started")
        pids = epochs(server.log())[0]
        os.kill(pids[1], signal.SIGSTOP)
        self.assert_ends(server, 1, pids)
        self.assertRegex(server.log(), "rank 1 of 2 did not join|rank 1 was lost")  # the latter if it was stopped late

    def test_a_list_that_no_group_can_be_made_of_is_a_mistake(self):
        for flags, words in [(("--devices=cpu,cpu", "--device=cpu"), ("--device", "--devices", "only one")),
                             (("--devices=cpu,cuda:0",), ("'cpu,cuda:0'", "one kind")),
                             (("--devices=cuda:1,cuda:0,cuda:1",), ("cuda:1", "twice")),
                             (("--devices=" + ",".join(["cpu"] * 9),), ("9 devices", "at most 8")),
                             (("--devices=cpu,",), ("''", "cuda:0")),
                             (("--devices=cpu,auto",), ("'auto'", "cuda:0")),
                             (("--devices=gpu",), ("'gpu'", "cuda:0")),
                             (("--rank_timeout=10ms",), ("--rank_timeout", "10ms", "1s")),
                             (("--group_start_timeout=0",), ("--group_start_timeout", "1s")),
                             (("--group_rank=1",), ("internal", "--devices")),
                             (("--devices=cpu,cpu", "--group_rank=1"), ("internal", "--devices")),
                             (("--devices=cpu,cpu", "--group_rank=1", "--group_ranks=2", "--group_epoch=1",
                               "--group_socket=x", f"--group_parent={free_port()}"), ("internal", "--devices"))]:
            result = run(BINARY, "--listen=127.0.0.1:0", "--metrics_listen=", *flags)
            self.assert_no_start(result, 2, *words)

    def test_help_says_what_is_internal(self):
        text = run(BINARY, "--help").stdout
        for flag in ("group_rank", "group_ranks", "group_epoch", "group_socket", "group_parent"):
            self.assertRegex(text, rf"--{flag} \(internal")


if __name__ == "__main__":
    unittest.main()
