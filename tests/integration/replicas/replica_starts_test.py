#!/usr/bin/python3
"""How servers become replicas of one another: who is missing or is another than the set expects is named, and nobody serves
before all are there.

usage: replica_starts_test.py LOSSD

Nothing here is late: what has to happen is waited for as long as CTest allows.
"""
from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
import unittest
from pathlib import Path

from lossd_server import free_port
from replica_servers import ReplicaServer, ReplicaServers, until, write_token
from replica_test_case import FLAGS, TestCase, parse

SERVES, MET = " serving version=", " all replicas are there replicas="


class SlowPort:
    """An address, from __enter__ to __exit__, whose connections are those of `target`: what comes first waits for a while."""

    def __init__(self, target: str, seconds: float) -> None:
        host, port = target.split(":")
        self._target, self._seconds = (host, int(port)), seconds
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> str:
        threading.Thread(target=self._accept, daemon=True).start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._carry, args=self._listener.accept()[:1], daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            time.sleep(self._seconds)
            back = threading.Thread(target=self._pipe, args=(server, client), daemon=True)
            back.start()
            self._pipe(client, server)
            back.join()

    @staticmethod
    def _pipe(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while some := source.recv(1 << 16):
                to.sendall(some)
            to.shutdown(socket.SHUT_WR)


class Starts(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.leader = f"127.0.0.1:{free_port()}"
        self.token = write_token(self.folder / "token")

    def begin(self, number: int, *flags: str, token: Path | None = None) -> ReplicaServer:
        """One of two. The last of several flags of one name counts."""
        common = ["--replica_set=t", "--replicas=2", f"--replica_leader={self.leader}", "--replica_timeout=1s",
                  f"--group_token_file={token or self.token}", *FLAGS, *flags]
        self.sets += 1
        folder = self.folder / str(self.sets)
        folder.mkdir()
        server = ReplicaServer(self.options.lossd, folder, number, common, devices="cpu")
        self.addCleanup(server.close)
        server.begin()
        return server

    def await_log(self, server: ReplicaServer, words: str) -> None:
        until(lambda: words in server.log() or not server.running())
        self.assertIn(words, server.log())

    def test_nobody_serves_before_all_are_there_and_who_is_missing_is_named(self) -> None:
        first = self.begin(0)
        self.await_log(first, "1 of 2 did not join")
        self.assertNotIn(SERVES, first.log())
        second = self.begin(1)
        for server in (first, second):
            self.await_log(server, SERVES)

    def test_others_may_come_before_the_coordinator(self) -> None:
        second = self.begin(1)
        self.await_log(second, f"found no leader at {self.leader}")
        self.assertNotIn(SERVES, second.log())
        for server in (self.begin(0), second):
            self.await_log(server, SERVES)

    def test_a_coordinator_whose_answer_takes_its_time_is_found(self) -> None:
        """As through a slow network, or with a slow resolver of names."""
        first = self.begin(0)
        with SlowPort(self.leader, seconds=1.5) as slow:
            second = self.begin(1, f"--replica_leader={slow}")
            for server in (first, second):
                self.await_log(server, SERVES)
            second.kill()

    def test_who_is_another_than_the_set_expects_is_told_what_differs_and_stays_out(self) -> None:
        first = self.begin(0)
        other_token = write_token(self.folder / "other", "known-to-nobody-else-at-all-in-this-test")
        for flags, token, words in [
                ((), other_token, ["token", "--group_token_file"]),
                (("--replicas=3",), None, ["of 2", "has 3"]),
                (("--replica_set=u",), None, ["--replica_set=t", "--replica_set=u"]),
                (("--replica_timeout=3s",), None, ["--replica_timeout=1s", "--replica_timeout=3s"]),
                (("--devices=cpu,cpu",), None, ["--devices=1", "--devices=2"])]:
            with self.subTest(flags=flags):
                other = self.begin(1, *flags, token=token)
                until(lambda: all(word in other.log() for word in words) or not other.running())  # noqa: B023: called here
                for word in words:
                    self.assertIn(word, other.log())
                self.assertNotIn(SERVES, other.log())
                other.kill()
        self.assertNotIn(SERVES, first.log())
        second = self.begin(1)  # the right one is taken all the same
        for server in (first, second):
            self.await_log(server, SERVES)

    def test_the_second_of_two_with_one_number_waits_until_the_first_is_gone(self) -> None:
        first, second = self.begin(0), self.begin(1)
        self.await_log(second, SERVES)
        twin = self.begin(1)
        self.await_log(twin, "has joined before")
        self.assertNotIn(SERVES, twin.log())
        self.assertEqual(first.log().count(MET), 1, f"a twin has disturbed the set:\n{first.log()}")
        second.kill()
        self.await_log(twin, SERVES)

    def test_a_second_coordinator_cannot_listen_and_says_so(self) -> None:
        first, _ = self.begin(0), self.begin(1)
        self.await_log(first, SERVES)
        twin = self.begin(0)
        self.await_log(twin, f"cannot listen on {self.leader}")
        self.assertNotIn(SERVES, twin.log())
        self.assertEqual(first.log().count(MET), 1, f"a twin has disturbed the set:\n{first.log()}")

    def test_the_port_of_clients_is_no_control_and_is_said_not_to_be(self) -> None:
        first, second = self.begin(0), self.begin(1)
        self.await_log(first, SERVES)
        lost = self.begin(1, f"--replica_leader={first.target}")
        self.await_log(lost, f"{first.target} is not the control of replica 0")
        second.kill()
        self.assertNotIn(SERVES, lost.log())

    def test_the_token_is_in_no_log(self) -> None:
        servers = [self.begin(number) for number in (0, 1)]
        text = self.token.read_text(encoding="ascii").strip()
        for server in servers:
            self.await_log(server, SERVES)
            self.assertNotIn(text, server.log())

    def test_flags_that_make_no_set_are_a_mistake_that_says_what_to_do(self) -> None:
        good = {"replica_set": "t", "replicas": "2", "replica": "1", "replica_leader": self.leader, "group_token_file": self.token}
        for changes, words in [
                ({"replica_set": None}, ["without --replica_set"]),
                ({"replica_set": "a b"}, ["--replica_set", "'a b'"]),
                ({"replicas": "1"}, ["--replicas is 1", "from 2 to 1024"]),
                ({"replicas": "1025"}, ["--replicas is 1025", "from 2 to 1024"]),
                ({"replicas": None}, ["--replicas is 0"]),
                ({"replica": "2"}, ["replica 2 of 2", "from 0 to 1"]),
                ({"replica": "x"}, ["--replica is 'x'", "lws", "stateful_set"]),
                ({"replica": "lws"}, ["LWS_GROUP_INDEX"]),
                ({"replica_leader": None}, ["--replica_leader=HOST"]),
                ({"replica_leader": "10.0.0.1:port"}, ["--replica_leader"]),
                ({"group_token_file": None}, ["--group_token_file"]),
                ({"replica_timeout": "10ms"}, ["--replica_timeout", "1s"])]:
            with self.subTest(changes=changes):
                flags = [f"--{name}={value}" for name, value in {**good, **changes}.items() if value is not None]
                result = subprocess.run([self.options.lossd, "--device=cpu", "--listen=127.0.0.1:0", "--metrics_listen=", *flags],
                                        capture_output=True, text=True, timeout=300, check=False)
                self.assertEqual(result.returncode, 2, result.stderr)
                for word in words:
                    self.assertIn(word, result.stderr)


class Ends(TestCase):
    def test_all_end_in_order_when_they_are_told_to(self) -> None:
        servers = self.start(3)
        self.reach(servers)[1].create("h", 64, 8)
        self.assertEqual(servers.stop(), [0, 0, 0], servers.log())

    def test_who_waits_for_others_ends_when_it_is_told_to(self) -> None:
        for number in (0, 1):
            servers = ReplicaServers(self.options.lossd, self.folder / f"alone{number}", 2, *FLAGS)
            self.addCleanup(servers.close)
            servers[number].begin("--replica_timeout=1s")
            until(lambda: "not all replicas are there" in servers[number].log())  # noqa: B023: called here
            servers[number].signal(15)
            self.assertEqual(servers[number].wait(), 0, servers[number].log())


if __name__ == "__main__":
    TestCase.options = parse()
    unittest.main()
