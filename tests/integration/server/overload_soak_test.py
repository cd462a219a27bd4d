#!/usr/bin/python3
"""Many clients at once, half of which never read their answers.

  overload_soak_test.py LOSSD [--seconds S | --minutes M] [--clients N] [--allowed BYTES] [--json]

Half of the clients send as fast as they are let, never read, and start again every few seconds; the others keep some
chunks under way and count what comes back. Fails unless the server's memory stays as it is a quarter of the time after they came,
and what is under way within the credits, the reading clients get even shares of the rows though their chunks differ in
size, and, once the others were killed and the reading ones have left, no credit, queued chunk, stream or staging memory is
held any more.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
from lossd.v1 import loss_pb2, loss_pb2_grpc
from lossd_server import LossdServer
from programs import Program, join
from waiting import PATIENCE

from streaming import OPTIONS, chunk_request, create_head, open_session, start_request

VOCAB, HIDDEN = 4096, 128
CHUNK_TOKENS = (32, 64)  # of every second reading client
ROWS_UNDER_WAY = 256
MUTE_SECONDS = 5  # until a mute client starts again, at most
MOST_SPREAD = 1.5  # of the reading clients' rows: the most over the least, but for what one has under way at either end
CREDIT = 1 << 20
LARGEST_COST = 256 << 10  # of a chunk of 64 tokens and its answer, with what the transport keeps of them
FLAGS = (f"--lane_credit_bytes={CREDIT}", "--staging_bytes=268435456", "--session_lease=5s")  # of sessions whose client was killed
SAMPLE_SECONDS = 1.0


def connect(target):
    return grpc.insecure_channel(target, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


def in_threads(function, count):
    threads = [threading.Thread(target=function, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def make_chunk(session, sequence, tokens):
    rng = np.random.default_rng(1)
    return chunk_request(session, sequence, rng.integers(0, VOCAB, tokens),
                         rng.standard_normal((tokens, HIDDEN), dtype=np.float32))


def be_mute(target, count, seconds):
    """Until killed."""
    pause = min(MUTE_SECONDS, seconds / 3)

    def client(number):
        channel = connect(target)
        stub = loss_pb2_grpc.LossServiceStub(channel)
        template = None
        while True:
            session = open_session(channel, "h", f"mute {number}")
            template = template or make_chunk(session, 1, 64)
            first = max(1, session.lanes[0].accepted - 8)  # those that it takes back in this moment are repeats

            def requests(session=session, sequence=first):
                yield start_request(session)
                while True:
                    template.chunk.sequence = sequence
                    yield template
                    sequence += 1

            stream = stub.Compute(requests())
            time.sleep(pause * random.uniform(0.5, 1.5))
            stream.cancel()

    in_threads(client, count)
    signal.pause()


def read_answers(target, count, _):
    """Writes the rows of each client once a second, until SIGTERM; then leaves in order."""
    rows = [0] * count
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())

    def client(number):
        channel = connect(target)
        stub = loss_pb2_grpc.LossServiceStub(channel)
        session = open_session(channel, "h", f"reading {number}")
        tokens = CHUNK_TOKENS[number % len(CHUNK_TOKENS)]
        free = threading.Semaphore(ROWS_UNDER_WAY // tokens)
        chunk = make_chunk(session, 1, tokens)

        def requests():
            yield start_request(session)
            sequence = 0
            while not leaving.is_set():
                free.acquire()
                sequence += 1
                chunk.chunk.sequence = sequence
                yield chunk

        for response in stub.Compute(requests()):
            if response.HasField("result"):
                rows[number] += response.result.tokens
                free.release()
        stub.CloseSession(loss_pb2.CloseSessionRequest(session_id=session.session_id))

    threads = in_threads(client, count)
    while any(thread.is_alive() for thread in threads):
        print(json.dumps(rows), flush=True)
        leaving.wait(SAMPLE_SECONDS)
        if leaving.is_set():
            for thread in threads:
                thread.join()


def await_at_most(server, **most):
    """Until the server has no more of these than so many."""
    def reached():
        metrics = server.metrics()
        return all(metrics[f"lossd_{name}"] <= value for name, value in most.items())

    server.wait_until(reached, f"at most {most}", every=0.2)


def start(role, server, count, seconds, **options):
    return Program(sys.executable, __file__, role, "--role", server.target, "--clients", count, "--seconds", seconds, log=server.folder / role,
                   **options).start()


def shares_since(warm, rows):
    return [after - before for before, after in zip(warm[1], rows[-1][1])] if warm else [0]


def soak(args, server):
    half = args.clients // 2
    with grpc.insecure_channel(server.target, options=OPTIONS) as channel:
        create_head(channel, "h", VOCAB, HIDDEN)
    reading = start("reading", server, args.clients - half, args.seconds, stdout=subprocess.PIPE, text=True)
    mute = start("mute", server, half, args.seconds)
    rows = []

    def follow():
        for line in reading.stdout:
            rows.append((time.monotonic(), json.loads(line)))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        begin = time.monotonic()
        warm, at_warm, most_memory, most_credit, quarters, full = None, 0, 0, 0, [], None
        # On a busy machine longer, until each has had something since it was warm: nobody's share is even of nothing.
        while time.monotonic() < begin + args.seconds or min(shares_since(warm, rows)) == 0:
            time.sleep(SAMPLE_SECONDS)
            if not reading.running() or time.monotonic() > begin + args.seconds + PATIENCE:
                raise AssertionError(f"not every reading client gets something: {rows[-1:]}\n{reading.last_words()}")
            metrics = server.metrics()
            memory = metrics["process_resident_memory_bytes"]
            most_credit = max(most_credit, metrics["lossd_credit_bytes"])
            # Where processes take long to start, many of those that never read come late.
            if full is None and metrics["lossd_live_streams"] >= 0.75 * args.clients:
                full = time.monotonic()
            lasted = full is not None and time.monotonic() >= full + args.seconds / 4
            if warm is None and lasted and rows and min(rows[-1][1]) > 0:
                warm, at_warm = rows[-1], memory
            most_memory = max(most_memory, memory)
            if time.monotonic() >= begin + args.seconds * (len(quarters) + 1) / 4:
                quarters.append(int(memory) >> 20)
        end = rows[-1]
        streams = metrics["lossd_live_streams"]
        mute.kill()
        await_at_most(server, live_streams=args.clients - half)
        reading.stop()
        join([follower])
        await_at_most(server, live_streams=0, queued_chunks=0, credit_bytes=0, sessions=0, staging_reserved_bytes=0)
    finally:
        for process in (mute, reading):
            process.kill()
    shares = shares_since(warm, [end])
    small, large = (sum(shares[first::len(CHUNK_TOKENS)]) for first in range(len(CHUNK_TOKENS)))
    metrics = server.metrics()
    return {"clients": args.clients, "seconds": round(time.monotonic() - begin, 1), "streams": streams,
            "rows": sum(shares), "least_rows": min(shares), "most_rows": max(shares),
            "rows_in_small_chunks": small, "rows_in_large_chunks": large,
            "chunks_withdrawn": metrics['lossd_chunks_total{outcome="withdrawn"}'], "most_credit_bytes": most_credit,
            "memory_after_warm_up": at_warm, "most_memory": most_memory, "growth": most_memory - at_warm,
            "allowed": args.allowed, "memory_mib_by_quarter": " ".join(map(str, quarters)), "server_cpu_seconds": round(metrics["process_cpu_seconds_total"], 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--allowed", type=int, default=64 << 20, help="bytes the memory may grow by")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", metavar="TARGET", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        return {"mute": be_mute, "reading": read_answers}[args.lossd](args.role, args.clients, args.seconds)
    if args.minutes:
        args.seconds = args.minutes * 60
    os.environ["OMP_NUM_THREADS"] = "1"  # so that the clients come to run, too
    with LossdServer(args.lossd, *FLAGS) as server:
        report = soak(args, server)
    print(json.dumps(report) if args.json else "\n".join(f"{key:22}{value:>20}" for key, value in report.items()))
    if report["least_rows"] == 0 or report["most_rows"] > MOST_SPREAD * report["least_rows"] + 2 * ROWS_UNDER_WAY:
        sys.exit("the reading clients' shares are not even")
    if report["most_credit_bytes"] > args.clients * (CREDIT + LARGEST_COST):
        sys.exit("more was under way than the credits allow")
    if report["growth"] > args.allowed:
        sys.exit("the server's memory grew")


if __name__ == "__main__":
    main()
