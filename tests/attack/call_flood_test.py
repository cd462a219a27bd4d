#!/usr/bin/python3
"""Connections that open calls without end take neither the server's memory nor its answers to others.

  call_flood_test.py LOSSD [--seconds S] [--connections N] [--json]

Every connection resets its calls at once (CVE-2023-44487) or leaves them all open, and comes again when it is ended, or resets some
thousand and hangs up before anybody can end it: in plain text with and without tokens, over TLS and over mTLS. And one floods the port
for lanes at a rank of a group, in plain text, with Compute streams, each of which would be a call to the leader. The flood has a lower
priority than the server, with which it shares processors. Fails if the memory of a process of the server's grows by more than 512 MiB, if it does not answer any more, if it cut off no connection, or if there was
no flood: fewer than 2000 calls were sent. How long others waited is printed and not judged.
"""
import argparse
import json
import multiprocessing
import operator
import os
import re
import ssl
import sys
import tempfile
import threading
import time

import grpc
from access_support import HEALTH, TOKENS, Certificates, bearer, write_tokens
from http2 import CallFlood
from lossd.v1 import status_pb2, status_pb2_grpc
from lossd_server import LossdServer
from waiting import PATIENCE

from group_support import epochs

MOST_GROWTH = 512 << 20
LEAST_CALLS = 2000
CALLS_AT_ONCE = 500
CALLS_BEFORE_HANGING_UP = 2500
FLOODS = ("reset", "left open", "reset, and hung up")
RANK = "at a rank"
COMPUTE = "/lossd.v1.LossService/Compute"
QUIET_SECONDS = 2  # at most


def flood_over_one(address, path, tls, calls, until, counts):
    most = CALLS_BEFORE_HANGING_UP if calls == "reset, and hung up" else sys.maxsize
    while time.monotonic() < until:
        try:
            flood = CallFlood(address, path, calls != "left open", tls)
            sent = 0
            counts["connections"] += 1
            try:
                while time.monotonic() < until and sent < most:
                    flood.open_calls(CALLS_AT_ONCE)
                    sent += CALLS_AT_ONCE
                    counts["calls"] += CALLS_AT_ONCE
                if sent >= most:
                    flood.hang_up()
            finally:
                flood.close()
        except OSError:
            time.sleep(0.01)


def flood(address, path, make_tls, calls, seconds, connections, result):
    """In a process of its own: what it sent goes to `result`."""
    os.nice(19)
    tls = make_tls()
    counts = [{"connections": 0, "calls": 0} for _ in range(connections)]
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=flood_over_one, args=(address, path, tls, calls, until, count)) for count in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.put({key: sum(count[key] for count in counts) for key in counts[0]})


class Client:
    """Somebody else, who asks for the status all the time."""

    def __init__(self, channel, metadata):
        self._stub = status_pb2_grpc.StatusServiceStub(channel)
        self._metadata = metadata

    def ask(self):
        began = time.monotonic()
        self._stub.GetStatus(status_pb2.GetStatusRequest(), metadata=self._metadata, timeout=120)
        return time.monotonic() - began

    def ask_while(self, goes_on):
        """Seconds that 99 of 100 answers took at most, and that the longest took."""
        waits = [self.ask()]
        while goes_on():
            time.sleep(0.005)
            waits.append(self.ask())
        waits.sort()
        return waits[len(waits) * 99 // 100], waits[-1]


def resident_bytes(pid, field="VmRSS"):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return 1024 * int(re.search(rf"^{field}:\s+(\d+)", file.read(), re.MULTILINE)[1])


def connections_cut_off(server):
    return int(server.metric("lossd_connections_flooding_total"))


class Way:
    """One way in: how the server is started and how others and the flood connect."""

    def __init__(self, certificates, tokens):
        self.certificates, self.tokens = certificates, tokens

    def flags(self, name):
        flags = []
        if name in ("TLS", "mTLS"):
            flags += self.certificates.server_flags()
        if name == "mTLS":
            flags += [f"--tls_client_ca={self.certificates.certificate('ca')}"]
        if name in ("tokens", "TLS"):
            flags += [f"--tokens={self.tokens}"]
        return flags

    def metadata(self, name):
        return bearer(TOKENS["admin"]) if name in ("tokens", "TLS") else None

    def channel(self, name, target):
        if name in ("plain text", RANK):
            return grpc.insecure_channel(target)
        if name == "tokens":
            return grpc.secure_channel(target, grpc.local_channel_credentials())
        return grpc.secure_channel(target, self.certificates.client(with_certificate=name == "mTLS"))

    def make_tls(self, name):
        if name not in ("TLS", "mTLS"):
            return None
        context = ssl.create_default_context(cafile=self.certificates.certificate("ca"))
        context.set_alpn_protocols(["h2"])
        if name == "mTLS":
            context.load_cert_chain(self.certificates.certificate("client"), self.certificates.key("client"))
        return context


class Attacked:
    """What of a server is flooded: all there is, or rank 1 of a group."""

    def __init__(self, server, name):
        self._server, self._at_rank = server, name == RANK
        self.address, self.path, self._pids = server.target, HEALTH, [server.pid]
        if self._at_rank:
            server.await_log(" takes lanes ")
            port = re.search(r" takes lanes .*port=(\d+) rank=1", server.log())[1]
            self.address, self.path, (self._pids,) = f"127.0.0.1:{port}", COMPUTE, epochs(server.log())

    def bytes(self, field="VmRSS"):
        """What each process has."""
        return [resident_bytes(pid, field) for pid in self._pids]

    def cut_off(self):
        """At least so many connections; a rank does not count, and logs some of them."""
        if not self._at_rank:
            return connections_cut_off(self._server)
        return len(re.findall(" a connection was ended: .* rank=1", self._server.log()))


def attack(args, way, name, calls):
    device = ("--devices=cpu,cpu", "--lanes_at_ranks=true") if name == RANK else ("--device=cpu",)
    with LossdServer(args.lossd, *device, *way.flags(name)) as server, way.channel(name, server.target) as channel:
        attacked = Attacked(server, name)
        client = Client(channel, way.metadata(name))
        quiet_until = time.monotonic() + min(QUIET_SECONDS, args.seconds / 4)
        quiet, _ = client.ask_while(lambda: time.monotonic() < quiet_until)
        before = attacked.bytes()
        result = multiprocessing.Queue()
        process = multiprocessing.Process(target=flood, args=(attacked.address, attacked.path, lambda: way.make_tls(name), calls,
                                                              args.seconds, args.connections, result), daemon=True)
        process.start()
        at_most = time.monotonic() + args.seconds + PATIENCE
        waited, longest = client.ask_while(lambda: process.is_alive() and time.monotonic() < at_most)
        process.join(0)
        if process.exitcode != 0:
            sys.exit(f"{name}: the process of the flood ended with {process.exitcode}")
        sent = result.get(timeout=PATIENCE)
        client.ask()
        report = {"way": name, "calls": calls, "sent": sent["calls"],
                  "connections": sent["connections"], "cut_off": attacked.cut_off(),
                  "quiet_p99_ms": 1e3 * quiet, "p99_ms": 1e3 * waited, "longest_ms": 1e3 * longest,
                  "growth_mib": max(map(operator.sub, attacked.bytes("VmHWM"), before)) / 2**20}
        if args.after > 0:
            time.sleep(args.after)
            report["held_mib"] = max(map(operator.sub, attacked.bytes(), before)) / 2**20
        return report


def floods_of(args, name):
    """What becomes of the calls: of every way each in turn, with --few of the first way each and of the others one."""
    if name == RANK:
        return FLOODS[:1]
    number = args.ways.index(name)
    return args.floods if number == 0 or not args.few else [args.floods[number % len(args.floods)]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--seconds", type=float, default=15, help="how long each flood lasts")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=["plain text", "tokens", "TLS", "mTLS", RANK])
    parser.add_argument("--floods", nargs="+", default=FLOODS, choices=FLOODS, help="what becomes of its calls; default: each in turn")
    parser.add_argument("--few", action="store_true", help="one kind of flood each, but for the first way")
    parser.add_argument("--after", type=float, default=0, help="then look so many seconds later how much memory is still held")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    reports = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = os.path.join(folder, "tokens")
        write_tokens(tokens, TOKENS.items())
        way = Way(Certificates(folder), tokens)
        for name in args.ways:
            for calls in floods_of(args, name):
                reports.append(attack(args, way, name, calls))
                if not args.json:
                    print("  ".join(f"{key} {value if isinstance(value, (int, str)) else format(value, '.1f')}"
                                    for key, value in reports[-1].items()), flush=True)
    if args.json:
        print(json.dumps(reports))
    wrong = []
    for report in reports:
        which = f"{report['way']}, calls {report['calls']}"
        if report["growth_mib"] * 2**20 > MOST_GROWTH:
            wrong.append(f"{which}: the server's memory grew by more than {MOST_GROWTH >> 20} MiB")
        if report["sent"] < LEAST_CALLS:
            wrong.append(f"{which}: only {report['sent']} calls were sent, which is no flood")
        if report["cut_off"] == 0:
            wrong.append(f"{which}: the server cut off no connection")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
