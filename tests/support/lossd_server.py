"""The one lossd of tests that are scripts: on free loopback ports, with its log, its metrics and its ends."""
import contextlib
import json
import os
import random
import socket
import tempfile
import urllib.request
from pathlib import Path

from programs import Program
from waiting import wait_until

_reserved = []


def free_ports(count):
    """The first of so many ports in a row. They are below those that the system gives to connections, or one might have
    it when the server starts, and no other test that runs meanwhile is given them."""
    for _ in range(10000):
        first = random.randrange(15000, 32000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as mine, contextlib.ExitStack() as taken:
            for port in range(first, first + count):
                mine.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0lossd-test-port-{port}")
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            _reserved.append(mine.pop_all())  # until this process ends
            return first
    raise RuntimeError(f"there are no {count} free ports in a row")


def free_port():
    return free_ports(1)


def await_ports(process, file, log):
    """What the server `process` writes to its --port_file, once it serves; if it ends before, an error that quotes its
    log. `log`: a path, or what gives the words."""
    def words():
        return log() if callable(log) else Path(log).read_text(encoding="utf-8", errors="replace")[-4000:]

    def written():
        if process.poll() is None:
            return os.path.exists(file)
        raise RuntimeError(f"lossd ended with {process.poll()} before it served:\n{words()}")

    wait_until(written, lambda: f"lossd serves\n{words()}")
    return json.loads(Path(file).read_text(encoding="utf-8"))


def read_metrics(url):
    """The values of a scrape, by series: 'lossd_token_reloads_total{outcome="ok"}'."""
    with urllib.request.urlopen(url, timeout=60) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {series: float(value) for series, value in pairs}


class LossdServer(Program):
    """Serves from __enter__ to __exit__, or from start() to close(). `target` is its gRPC address, `metrics_url` where it is
    scraped, `health_target` where probes look if there is a --health_listen. A flag that is given twice has the last value:
    who starts it again at the same place gives --listen. `folder`: for its log and its port file, where the test has one."""

    def __init__(self, binary, *flags, folder=None, **options):
        self._own_folder = None if folder else tempfile.TemporaryDirectory()
        self.folder = Path(folder or self._own_folder.name)
        super().__init__(binary, log=self.folder / "log", **options)
        self._flags = flags

    def flags(self):
        return ["--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", f"--port_file={self.folder}/ports.json", *self._flags]

    def port_file(self):
        return self.folder / "ports.json"

    def begin(self, *flags, **options):
        """The first half of start(), for several servers that wait for each other."""
        self.forget_ports()
        super().start(*self.flags(), *flags, **options)

    def forget_ports(self):
        """So that await_serving() waits for what comes next."""
        self.port_file().unlink(missing_ok=True)

    def await_serving(self):
        """Returns what the port file says."""
        ports = await_ports(self, self.port_file(), self.last_words)
        self.target = f"127.0.0.1:{ports['grpc']}"
        self.health_target = f"127.0.0.1:{ports['health']}"
        self.metrics_url = f"http://127.0.0.1:{ports['metrics']}/metrics"
        return ports

    def start(self, *flags, **options):
        """Returns when it serves."""
        self.begin(*flags, **options)
        self.await_serving()
        return self

    def log_lines(self):
        """What a server with --log_format=json has logged."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def metrics(self):
        return read_metrics(self.metrics_url)

    def metric(self, series):
        return self.metrics()[series]

    def _release(self):
        super()._release()
        if self._own_folder:
            self._own_folder.cleanup()


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
