"""A lossd of one's own on free loopback ports, for tests."""
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time


_reserved = []


def free_ports(count):
    """The first of so many ports in a row. They are below those that the system gives to connections, or one might have
    it when the server starts, and no other test that runs meanwhile is given them."""
    while True:
        first = random.randrange(15000, 32000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as mine, contextlib.ExitStack() as taken:
            for port in range(first, first + count):
                mine.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0lossd-test-port-{port}")
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            _reserved.append(mine.pop_all())  # until this process ends
            return first


def free_port():
    return free_ports(1)


def await_ports(process, file, log):
    """What the server `process` writes to its --port_file, once it serves; if it ends before, an error that quotes its
    log."""
    while not os.path.exists(file):
        if process.poll() is not None:
            with open(log, encoding="utf-8", errors="replace") as text:
                raise RuntimeError(f"lossd ended with {process.returncode} before it served:\n{text.read()[-4000:]}")
        time.sleep(0.02)
    with open(file, encoding="utf-8") as text:
        return json.load(text)


class LossdServer:
    """Runs from __enter__ to __exit__; `target` is its gRPC address, `metrics_url` where it is scraped, `health_target`
    where probes look if there is a --health_listen."""

    def __init__(self, binary, *flags):
        self._binary, self._flags = binary, flags
        self._process = None

    def __enter__(self):
        self.begin()
        self.await_serving()
        return self

    def begin(self):
        """The first half of entering it, for several that wait for each other."""
        self._folder = tempfile.TemporaryDirectory()
        self._ports = ports = os.path.join(self._folder.name, "ports.json")
        self._log = open(os.path.join(self._folder.name, "log"), "w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [self._binary, "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", f"--port_file={ports}", *self._flags],
            stdout=self._log, stderr=subprocess.STDOUT)

    def await_serving(self):
        found = await_ports(self._process, self._ports, self._log.name)
        self.target = f"127.0.0.1:{found['grpc']}"
        self.health_target = f"127.0.0.1:{found['health']}"
        self.metrics_url = f"http://127.0.0.1:{found['metrics']}/metrics"

    def log(self):
        """The lines that are complete: who reads a file that is being written may see the beginning of one."""
        self._log.flush()
        with open(self._log.name, encoding="utf-8") as file:
            text = file.read()
        return text[:text.rfind("\n") + 1]

    @property
    def pid(self):
        return self._process.pid

    def signal(self, number):
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self):
        """SIGTERM; returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def poll(self):
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait(self):
        """For its own end; returns the exit status."""
        return self._process.wait()

    def __exit__(self, *_):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()


class ReplicaSet:
    """Servers of a set `s` that hold replicas of the same heads, by number, from __enter__ to __exit__."""

    def __init__(self, binary, replicas, *flags):
        self._binary, self._replicas, self._flags = binary, replicas, flags

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            token = os.path.join(folder, "token")
            with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
                file.write("known-to-the-replicas-alone-as-they-meet\n")
            common = ["--replica_set=s", f"--replicas={self._replicas}", f"--replica_leader=127.0.0.1:{free_port()}",
                      f"--group_token_file={token}", *self._flags]
            servers = [LossdServer(self._binary, f"--replica={number}", *common) for number in range(self._replicas)]
            for server in servers:
                server.begin()
                stack.push(server.__exit__)
            for server in servers:
                server.await_serving()
            self._stack = stack.pop_all()
        return servers

    def __exit__(self, *error):
        self._stack.__exit__(*error)
