#!/usr/bin/python3
"""A connection that sends frames which mean nothing, without a pause, keeps nobody else from connecting, nor the server from ending,
and takes no memory.

  endless_frames_test.py LOSSD [--connections N ...] [--answers N] [--late]

It comes again when it is ended. Fails if nobody else is answered while it goes on, if the
server's memory grows by more than 256 MiB or if it does not end. How long others waited is printed and not judged.

Then one sends in bursts, each twice as long as the one before, for which the server must not reserve more memory than that, either.

More connections at a time than gRPC has threads that poll do keep others waiting: gRPC 1.51 reads each for as long as there is more to
read. That is a flaw of its own; a network policy keeps such strangers away. With --late each connection begins to send a moment after it was made, and is read by those threads from the beginning.
"""
import argparse
import multiprocessing
import os
import re
import socket
import sys
import threading
import time

import grpc
from http2 import PREFACE, SETTINGS, frame
from lossd.v1 import status_pb2, status_pb2_grpc
from lossd_server import LossdServer
from waiting import PATIENCE

LEAST_SENT = 64 << 20
MOST_GROWTH = 256 << 20
UNKNOWN = 0xbb
BURST_FRAMES = 9
FRAMES = frame(UNKNOWN, 0, 0) * 100_000


def connect(address):
    """From another host than that of the clients, as the server sees it."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))


def send_frames(address, late, counts):
    while True:
        try:
            with connect(address) as connection:
                connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
                time.sleep(late)
                while True:
                    connection.sendall(FRAMES)
                    counts["sent"] += len(FRAMES)
        except OSError:
            counts["ended"] += 1
            time.sleep(0.01)


def flood(address, connections, late, nice, over, result):
    """In a process of its own: until `over`; what it sent goes to `result`."""
    os.nice(nice)
    counts = [{"sent": 0, "ended": 0} for _ in range(connections)]
    for count in counts:
        threading.Thread(target=send_frames, args=(address, late, count), daemon=True).start()
    over.wait()
    result.put({key: sum(count[key] for count in counts) for key in counts[0]})
    result.close()
    result.join_thread()
    os._exit(0)  # threads may be in the middle of a send


def ask(channel):
    began = time.monotonic()
    status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(), timeout=PATIENCE)
    return time.monotonic() - began


def ask_anew(target):
    began = time.monotonic()
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask(channel)
    return time.monotonic() - began


def peak_bytes(pid, field="VmHWM"):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return 1024 * int(re.search(rf"^{field}:\s+(\d+)", file.read(), re.MULTILINE)[1])


def start_flood(server, connections, late, nice):
    over, result = multiprocessing.Event(), multiprocessing.Queue()
    flooding = multiprocessing.Process(target=flood, args=(server.target, connections, late, nice, over, result), daemon=True)
    flooding.start()
    return flooding, over, result


def check(server, sent, growth):
    if sent < LEAST_SENT:
        sys.exit("there was no flood")
    if growth > MOST_GROWTH:
        sys.exit(f"the server's memory grew by {growth >> 20} MiB, more than {MOST_GROWTH >> 20}")
    status = server.stop()
    if status != 0:
        sys.exit(f"the server ended with {status}:\n{server.log()}")


def attack(args, connections):
    with LossdServer(args.lossd, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
        ask(channel)
        before = peak_bytes(server.pid)
        flooding, over, result = start_flood(server, connections, 0.2 if args.late else 0, 19)
        try:
            time.sleep(1)  # for the flood to be one
            anew, there = [], []
            for _ in range(args.answers):
                anew.append(ask_anew(server.target))
                there.append(ask(channel))
            growth = peak_bytes(server.pid) - before
            server.stop()
        finally:
            over.set()
        sent = result.get(timeout=PATIENCE)
        flooding.join(PATIENCE)
        print(f"connections {connections}  sent_mib {sent['sent'] >> 20}  ended {sent['ended']}  "
              f"new_longest_ms {1e3 * max(anew):.1f}  there_longest_ms {1e3 * max(there):.1f}  "
              f"growth_mib {growth / 2**20:.1f}", flush=True)
        check(server, sent["sent"], growth)


def send_bursts(address, sent, over):
    """Each is twice as long as the one before: gRPC reads into as much memory as came without a pause."""
    with connect(address) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
        for exponent in range(8):
            time.sleep(0.2)
            for _ in range(2**exponent):
                connection.sendall(FRAMES * BURST_FRAMES)
        time.sleep(0.2)
        connection.sendall(FRAMES)
        sent.set()
        over.wait()


def attack_with_bursts(args):
    with LossdServer(args.lossd, "--device=cpu") as server:
        ask_anew(server.target)
        before = peak_bytes(server.pid, "VmPeak")
        sent, over = multiprocessing.Event(), multiprocessing.Event()
        flooding = multiprocessing.Process(target=send_bursts, args=(server.target, sent, over), daemon=True)
        flooding.start()
        while not sent.wait(1):
            if not flooding.is_alive():
                sys.exit(f"the connection was ended before all was sent; server: {server.poll()}\n{server.log()}")
        time.sleep(0.5)  # for what was sent last to be read
        growth = peak_bytes(server.pid, "VmPeak") - before
        over.set()
        flooding.join(PATIENCE)
        print(f"bursts  growth_mib {growth / 2**20:.1f}", flush=True)
        ask_anew(server.target)
        check(server, LEAST_SENT, growth)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--connections", type=int, nargs="+", default=[1])
    parser.add_argument("--answers", type=int, default=10, help="that others wait for")
    parser.add_argument("--late", action="store_true")
    args = parser.parse_args()
    for connections in args.connections:
        attack(args, connections)
    os.environ["MALLOC_ARENA_MAX"] = "1"  # others are reserved in pieces of 64 MiB
    attack_with_bursts(args)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
