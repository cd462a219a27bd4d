#!/usr/bin/python3
"""What lies between hosts: an interface eth0 for each of them, and the way that frames take from one to the next.

  wire.py NAME=ADDRESS... --delay_ms=MS

The first NAME has the namespace that this runs in; each of the others gets a network namespace and a host name of its own. Writes
a line of JSON, {"host": {"net": FD, "uts": FD}}: descriptors of this process, through which others enter. Then reads lines
{"cut": [[FROM, TO], ...]}, each of which says all pairs of hosts that nothing passes between in that direction, and answers each
with an empty line once it holds, for frames that are under way as well. Ends when its standard input does, and the hosts
with it.

Interfaces are TAP: a frame that a host sends is read here, held and written to whoever it is for. A bridge with veth could not hold
frames without netem, which few kernels of containers and test machines have.
"""
from __future__ import annotations

import argparse
import collections
import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MOST_BYTES = 65536  # of a frame
BURST = 64  # frames of one host that are read before another's are


def new_namespaces(name: str) -> dict[str, int]:
    """This process is in them from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
    return {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")}


def mac_address(host: int) -> bytes:
    return bytes((2, 0, 0, 0, 0, host))


def new_interface(host: int, addresses: list[str]) -> int:
    """eth0 of the namespace that this process is in, which knows where the other hosts are: asking would take both ways."""
    interface = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(interface, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    commands = ["link set lo up", f"link set eth0 address {mac_address(host).hex(':')}",
                f"address add {addresses[host]}/24 dev eth0", "link set eth0 up"]
    commands += [f"neighbour add {address} lladdr {mac_address(other).hex(':')} dev eth0 nud permanent"
                 for other, address in enumerate(addresses) if other != host]
    subprocess.run(["ip", "-batch", "-"], check=True, text=True, input="\n".join(commands) + "\n")
    return interface


class Wire:
    """Frames on their way, in the order in which they arrive: all take equally long."""

    def __init__(self, interfaces: list[int], delay: float) -> None:
        self._interfaces, self._delay = interfaces, delay
        self._under_way: collections.deque[tuple[float, int, int, bytes]] = collections.deque()
        self.cut: set[tuple[int, int]] = set()

    def run(self, commands: int) -> None:
        """Until there are no more commands."""
        senders = {interface: host for host, interface in enumerate(self._interfaces)}
        while True:
            patience = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            readable = select.select([commands, *self._interfaces], [], [], patience)[0]
            for descriptor in readable:
                if descriptor != commands:
                    self._receive(senders[descriptor], descriptor)
            self._deliver()
            if commands in readable and not self._obey():
                return

    def _receive(self, sender: int, interface: int) -> None:
        for _ in range(BURST):
            try:
                frame = os.read(interface, MOST_BYTES)
            except BlockingIOError:
                return
            due = time.monotonic() + self._delay
            if frame[0] & 1:  # to everybody
                for receiver in range(len(self._interfaces)):
                    if receiver != sender:
                        self._under_way.append((due, sender, receiver, frame))
            elif frame[:5] == mac_address(0)[:5] and frame[5] < len(self._interfaces):
                self._under_way.append((due, sender, frame[5], frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, sender, receiver, frame = self._under_way.popleft()
            if (sender, receiver) in self.cut:
                continue
            try:
                os.write(self._interfaces[receiver], frame)
            except OSError:
                pass  # its queue is full, or the interface is down: lost, as on any network

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if line:
            self.cut = {(sender, receiver) for sender, receiver in json.loads(line)["cut"]}
            print(flush=True)
        return bool(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="+")
    parser.add_argument("--delay_ms", type=float, required=True, help="of each frame")
    options = parser.parse_args()
    names, addresses = map(list, zip(*(host.split("=") for host in options.hosts)))
    interfaces = [new_interface(0, addresses)]
    namespaces = {}
    for host in range(1, len(names)):
        namespaces[names[host]] = new_namespaces(names[host])
        interfaces.append(new_interface(host, addresses))
    print(json.dumps(namespaces), flush=True)
    Wire(interfaces, options.delay_ms / 1000).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
