"""Hosts on one machine: network namespaces with host names and addresses of their own and a network between them that is slow,
loses packets, and is cut where a test wants it.

    if __name__ == "__main__":
        isolate()
        with Hosts(4) as hosts:
            hosts[1].run("ping", "-c1", hosts[2].address)

Nothing of it is in the namespaces of the machine, and nothing is left of it or of what was started on hosts when the program
ends, even by SIGKILL: the program is the first process of a namespace of processes, of mounts and of networks. It is on the
network too (Hosts.here), as a machine of clients.
"""
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from programs import Program, run

SKIPPED = 77  # what CTest takes for "skipped", and ./check.sh for a failure
_INSIDE = "LOSSD_TEST_HOSTS_INSIDE"


def isolate() -> None:
    """To be called first of all: starts the program once more, in namespaces of its own. Where those cannot be made it ends with
    SKIPPED, and says what is missing."""
    if os.environ.pop(_INSIDE, None):
        return
    sys.stdout.flush()
    namespaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        namespaces.append("--map-root-user")
    wanting = _what_is_missing(namespaces)
    if wanting:
        print(f"skipped: no hosts can be made here: {wanting}", file=sys.stderr)
        sys.exit(SKIPPED)
    os.environ[_INSIDE] = "1"
    os.execvp(namespaces[0], [*namespaces, sys.executable, *sys.argv])


def _what_is_missing(namespaces: list[str]) -> str:
    for program in ("unshare", "nsenter", "mount", "ip", "iptables"):
        if shutil.which(program) is None:
            return f"there is no {program} (tools/setup.sh test installs it)"
    attempt = [*namespaces, "ip", "tuntap", "add", "dev", "eth0", "mode", "tap"]
    done = run(*attempt)
    if done.returncode != 0:
        return f"{' '.join(attempt)}: {done.stderr.strip()} (it takes root, and /dev/net/tun; in a container --privileged)"
    return ""


class Host:
    """A machine, as far as its network, its host name and its /etc/hosts go; its files are everybody's."""

    def __init__(self, number: int, name: str, address: str, namespaces: dict[str, str]) -> None:
        """`namespaces`: the file of each kind, if they are not this program's."""
        self.number, self.name, self.address, self._namespaces = number, name, address, namespaces

    def command(self, *arguments: object) -> list[str]:
        """The same on this host."""
        enter = ["nsenter", *(f"--{kind}={file}" for kind, file in self._namespaces.items())] if self._namespaces else []
        return [*enter, *map(str, arguments)]

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Returns when it has ended, in order."""
        done = run(*self.command(*arguments), **options)
        if done.returncode != 0:
            raise AssertionError(f"{self.name}: {' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stderr}")
        return done

    def open_socket(self, kind: socket.SocketKind) -> socket.socket:
        """On this host's network, and held by this program."""
        with ThreadPoolExecutor(1) as thread:  # that is then in the host's namespace
            return thread.submit(self._enter_and_open_socket, kind).result()

    def _enter_and_open_socket(self, kind: socket.SocketKind) -> socket.socket:
        if self._namespaces:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(self._namespaces["net"], encoding="ascii") as namespace:
                if libc.setns(namespace.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
        return socket.socket(socket.AF_INET, kind)

    def lose(self, share: float) -> None:
        """From now on, of the packets that arrive, at random."""
        self.run("iptables", "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random", "--probability", share, "-j", "DROP")

    def lost(self) -> int:
        """Packets that lose() has had dropped."""
        rules = self.run("iptables", "-nvxL", "INPUT").stdout
        return sum(int(count) for count in re.findall(r"^\s*(\d+)\s+\d+\s+DROP\b", rules, re.MULTILINE))


class Hosts:
    """`hosts[i]` from __enter__ to __exit__, called node0, node1, ...; `here` is this program's own."""

    def __init__(self, count: int, delay_ms: float = 2, loss: float = 0.001) -> None:
        self._names = ["here", *(f"node{host}" for host in range(count))]
        self._addresses = [f"10.77.0.{254 if host == 0 else host}" for host in range(count + 1)]
        self._delay_ms, self._loss = delay_ms, loss
        self._cut: set[tuple[int, int]] = set()
        self._at_end = contextlib.ExitStack()
        self._hosts: list[Host] = []

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as at_failure:
            at_failure.callback(self._at_end.close)
            folder = Path(self._at_end.enter_context(tempfile.TemporaryDirectory()))
            self._name_hosts(folder / "hosts")
            self._wire = self._at_end.enter_context(Program(
                sys.executable, Path(__file__).with_name("wire.py"), f"--delay_ms={self._delay_ms}",
                *(f"{name}={address}" for name, address in zip(self._names, self._addresses)),
                log=folder / "wire", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            namespaces = json.loads(self._wire.read_line() or self._wire_ended())
            for number, (name, address) in enumerate(zip(self._names, self._addresses)):
                files = {kind: f"/proc/{self._wire.pid}/fd/{descriptor}" for kind, descriptor in namespaces.get(name, {}).items()}
                self._hosts.append(Host(number - 1, name, address, files))
                if self._loss:
                    self._hosts[-1].lose(self._loss)
            at_failure.pop_all()
        return self

    def _name_hosts(self, file: Path) -> None:
        """In the namespace of mounts that is this program's own."""
        lines = [f"{address} {name}\n" for name, address in zip(self._names, self._addresses)]
        file.write_text("127.0.0.1 localhost\n" + "".join(lines), encoding="ascii")
        subprocess.run(["mount", "--bind", str(file), "/etc/hosts"], check=True)
        self._at_end.callback(subprocess.run, ["umount", "/etc/hosts"], check=True)

    def _wire_ended(self) -> str:
        raise AssertionError(f"the network could not be made: wire.py ended with {self._wire.wait()}:\n{self._wire.log()}")

    def __exit__(self, *_: object) -> None:
        self._at_end.close()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[1:][number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts[1:])

    def __len__(self) -> int:
        return len(self._hosts) - 1

    @property
    def here(self) -> Host:
        return self._hosts[0]

    def cut(self, sender: Host, receiver: Host) -> None:
        """Nothing that the one sends reaches the other any more."""
        self._set_cut(self._cut | {(sender.number + 1, receiver.number + 1)})

    def part(self, one: Iterable[Host], other: Iterable[Host]) -> None:
        """Nothing passes between these and those."""
        pairs = {(a.number + 1, b.number + 1) for a in one for b in other}
        self._set_cut(self._cut | pairs | {(b, a) for a, b in pairs})

    def heal(self) -> None:
        self._set_cut(set())

    def _set_cut(self, cut: set[tuple[int, int]]) -> None:
        self._cut = cut
        self._wire.stdin.write(json.dumps({"cut": sorted(cut)}) + "\n")
        self._wire.stdin.flush()
        if not self._wire.read_line():
            self._wire_ended()
