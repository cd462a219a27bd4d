#!/usr/bin/python3
"""What an operator does to a server, or has done to it, while trainers go on: drains, restarts, a full disk, a clock that
is set, and file descriptors that run out. Every gradient is compared with NumPy's.

usage: operations_test.py LOSSD LIBFAKETIME
"""
from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import grpc
import lossd
from clients import Connect, PairTrainer, RegionTrainer, Stepper, Trainer
from lossd_server import free_port
from programs import join
from server import SoakServer
from standard_services import SERVING, health
from waiting import wait_until

BINARY, FAKETIME = sys.argv.pop(1), sys.argv.pop(1)
FLAGS = ("--workspace_bytes=16777216", "--same_host_regions")
HOUR = 3600


def save_between_flushes(head: lossd.Head, tag: str) -> None:
    """Trainers flush meanwhile, and a window that is frozen cannot be saved."""
    def saved() -> bool:
        with contextlib.suppress(lossd.FailedPreconditionError):
            head.save_checkpoint(tag)
            return True
        return False

    wait_until(saved, f"checkpoint {tag}", every=0)


class Servers(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def server(self, *flags: str, **options: object) -> SoakServer:
        server = SoakServer(BINARY, self.folder, *FLAGS, f"--region_socket_dir={self.folder}", *flags, tls=False)
        self.addCleanup(server.close)
        server.start(**options)
        return server

    def begin(self, connect: Connect, *kinds: type[Trainer]) -> list[Trainer]:
        trainers = [kind(connect, number) for number, kind in enumerate(kinds)]
        for trainer in trainers:
            trainer.start()
        self.await_rounds(trainers, 3)
        return trainers

    def await_rounds(self, trainers: list[Trainer], more: int) -> None:
        """Until each has gone on for so many rounds, all of which were right."""
        wanted = [trainer.rounds + more for trainer in trainers]
        wait_until(lambda: any(t.failure for t in trainers)
             or all(t.rounds >= want for t, want in zip(trainers, wanted, strict=True)))
        self.check(trainers)

    def check(self, trainers: list[Trainer]) -> None:
        self.assertEqual([trainer.failure for trainer in trainers if trainer.failure], [])

    def end(self, trainers: list[Trainer]) -> None:
        for trainer in trainers:
            trainer.stopping.set()
        join(trainers)
        self.check(trainers)

    def connection(self, server: SoakServer) -> Connect:
        return lambda: lossd.connect(server.socket_target, reconnect_timeout=120)


class Operations(Servers):
    def test_a_drain_under_load_and_the_restart_lose_nothing_and_count_nothing_twice(self) -> None:
        server = self.server()
        trainers = self.begin(self.connection(server), Trainer, PairTrainer, RegionTrainer, Stepper)
        for _ in range(3):
            self.assertEqual(server.stop(), 0, server.log()[-2000:])
            server.start()
            self.await_rounds(trainers, 2)
        self.end(trainers)
        self.assertEqual(server.metrics()["lossd_sessions"], 0)
        self.assertEqual(server.stop(), 0)

    def test_a_drain_by_a_call_does_the_same(self) -> None:
        server = self.server()
        trainers = self.begin(self.connection(server), Trainer, Stepper)
        with lossd.connect(server.target) as client:
            client.drain()
        self.assertEqual(server.wait(), 0, server.log()[-2000:])
        server.start()
        self.await_rounds(trainers, 2)
        self.end(trainers)

    def test_a_disk_that_fills_up_during_the_drain_is_told_and_the_checkpoint_before_it_stays(self) -> None:
        """A limit on the size of files stands in for the disk: the system refuses the write all the same."""
        server = self.server()
        with lossd.connect(server.target) as client:
            trainer = Trainer(lambda: client, 0)
            trainer.prepare(client)
            trainer.round()
            trainer.head.save_checkpoint("kept")
            trainer.compute(trainer.sessions[0])
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (32768, resource.RLIM_INFINITY))
            self.assertEqual(server.stop(), 1)
        errors = [line for line in server.log_lines() if line["level"] == "error"]
        self.assertTrue(errors, server.log()[-2000:])
        self.assertIn("could not be saved", str(errors[0]["event"]))
        server.start()
        with lossd.connect(server.target) as client:
            weights = client.head(trainer.name).read_weights()
            self.assertTrue((weights == trainer.oracle.weights.astype(weights.dtype)).all())

    def test_a_disk_that_fills_up_disturbs_no_training(self) -> None:
        server = self.server()
        trainers = self.begin(self.connection(server), Trainer, Stepper)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (32768, resource.RLIM_INFINITY))
        with lossd.connect(server.target) as client, self.assertRaises(lossd.ResourceExhaustedError):
            save_between_flushes(client.head(trainers[0].name), "full")
        self.await_rounds(trainers, 2)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with lossd.connect(server.target) as client:
            save_between_flushes(client.head(trainers[0].name), "room-again")
        self.assertEqual(server.stop(), 0)
        server.start()
        self.await_rounds(trainers, 2)
        self.end(trainers)

    def test_without_file_descriptors_who_is_there_goes_on_others_are_told_and_later_let_in(self) -> None:
        probes = f"127.0.0.1:{free_port()}"
        server = self.server(f"--health_listen={probes}")
        trainers = self.begin(self.connection(server), Trainer, RegionTrainer)
        operator = self.enterContext(lossd.connect(server.socket_target))
        head = operator.head(trainers[0].name)
        most = server.open_files() + 40
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (most, most))
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        wait_until(lambda: server.metrics()["lossd_connections_refused_total"] > 0)

        def told() -> bool:
            """A descriptor that was somebody else's for a moment may let a client in: the crowd takes that, too."""
            crowd.append(socket.create_connection(("127.0.0.1", server.port)))
            try:
                with lossd.connect(server.target, reconnect_timeout=0) as client:
                    client.status()
            except lossd.UnavailableError:
                return True
            return False

        wait_until(told, "a client that is told that it cannot connect")
        self.await_rounds(trainers, 2)
        with grpc.insecure_channel(probes) as probe:
            self.assertEqual(health(probe, "liveness"), SERVING)
        save_between_flushes(head, "nevertheless")
        self.assertTrue(any("too few file descriptors" in str(line["event"]) for line in server.log_lines()))
        for connection in crowd:
            connection.close()
        with lossd.connect(server.target, reconnect_timeout=120) as client:
            self.assertFalse(client.status().draining)
        self.await_rounds(trainers, 2)
        self.end(trainers)
        self.assertEqual(server.stop(), 0)

    def test_nonsense_on_the_port_cannot_flood_the_log(self) -> None:
        server = self.server()
        for _ in range(2000):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        self.assertEqual(server.stop(), 0)
        lines = server.log().splitlines()
        self.assertEqual([line for line in lines if not line.startswith("{")], [])
        self.assertLess(len(lines), 2000)


class Clock(Servers):
    """The clock that can be set jumps; the monotonic one goes on, as it does when an operator or NTP sets the time."""

    def server(self, *flags: str, **_options: object) -> SoakServer:
        self.assertTrue(os.path.exists(FAKETIME), "libfaketime is not installed (tools/setup.sh test installs it)")
        self.offset = self.folder / "offset"
        self.offset.write_text("+0\n")
        environment = {**os.environ, "LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(self.offset),
                       "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
        return super().server(*flags, env=environment)

    def jump(self, server: SoakServer, seconds: int) -> None:
        """Until the server's own log shows it: calls are answered first, and libfaketime looks at the file every second."""
        before = self.times(server)
        self.offset.write_text(f"{seconds:+d}\n")
        with lossd.connect(server.target) as client:

            def shown() -> bool:
                with self.assertRaises(lossd.NotFoundError):
                    client.head("no such head")
                return any(abs(after - before[-1]) > abs(seconds) / 2 for after in self.times(server)[len(before):])

            wait_until(shown)

    @staticmethod
    def times(server: SoakServer) -> list[float]:
        return [time.mktime(time.strptime(str(line["time"])[:19], "%Y-%m-%dT%H:%M:%S")) for line in server.log_lines()]

    def test_a_clock_that_is_set_forward_ends_no_session(self) -> None:
        server = self.server("--session_lease=1h")
        with lossd.connect(server.target) as client:
            trainer = Trainer(lambda: client, 0)
            trainer.prepare(client)
            batch = trainer.compute(trainer.sessions[0])
            with lossd.connect(server.target) as other:  # an idle session, without a stream
                other.head(trainer.name).open_session(client_key="idle")
                del other
            self.jump(server, 5 * HOUR)
            for _ in range(40):  # some of the server's ticks
                self.assertGreaterEqual(client.head(trainer.name).info().open_sessions, 1)
                time.sleep(0.1)
            trainer.consume([batch, trainer.compute(trainer.sessions[0])])
            trainer.round()
        self.assertEqual(server.stop(), 0)

    def test_a_clock_that_is_set_back_keeps_no_session_alive(self) -> None:
        server = self.server("--session_lease=2s")
        with lossd.connect(server.target) as client:
            head = client.create_head("h", 16, 4, "float32")
            session = head.open_session()
            self.assertEqual(head.info().open_sessions, 1)
            self.jump(server, -5 * HOUR)
            wait_until(lambda: head.info().open_sessions == 0)
            del session
        self.assertEqual(server.stop(), 0)

    def test_a_drain_waits_for_what_was_accepted_though_the_clock_is_set(self) -> None:
        for seconds in (5 * HOUR, -5 * HOUR):
            with self.subTest(seconds):
                server = self.server()
                trainers = self.begin(self.connection(server), Trainer, Stepper)
                self.jump(server, seconds)
                server.signal(signal.SIGTERM)
                self.offset.write_text("+0\n")
                self.assertEqual(server.wait(), 0)
                server.start()
                self.await_rounds(trainers, 2)
                self.end(trainers)
                self.assertEqual(server.stop(), 0)
                (self.folder / "checkpoints").rename(self.folder / f"checkpoints of {seconds}")


if __name__ == "__main__":
    threading.excepthook = lambda args: sys.stderr.write(f"{args.exc_value}\n")
    unittest.main()
