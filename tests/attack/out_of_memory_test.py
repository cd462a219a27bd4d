#!/usr/bin/python3
"""A server without memory refuses work or ends with a message and a status; it neither aborts nor hangs.

  out_of_memory_test.py LOSSD [--from MIB] [--to MIB] [--step MIB] [--report]

Starts a server for each limit of its address space, and gives one that serves heads, streams of chunks and calls until
it refuses them. Fails if a server ended otherwise than with a status that docs/operations.md names and a line that says
why, or if it neither serves nor ends. --report tells only.
"""
import argparse
import collections
import json
import os
import sys
import tempfile
import threading
import time

import grpc
import numpy as np
from lossd.v1 import head_pb2, head_pb2_grpc, loss_pb2_grpc, status_pb2, status_pb2_grpc
from lossd_server import LossdServer

from streaming import OPTIONS, chunk_request, create_head, open_session, start_request

PATIENCE = 60  # against hangs, in seconds
REFUSED, OUT_OF_MEMORY = 1, 3
HEADS, STREAMS, CHUNKS = 12, 8, 12
VOCAB, HIDDEN, TOKENS = 2048, 1024, 512


def limited(folder, lossd, mib):
    """A program that is `lossd` with so much address space."""
    path = os.path.join(folder, f"lossd-{mib}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nulimit -v {mib << 10}\nexec {os.path.abspath(lossd)} "$@"\n')
    os.chmod(path, 0o755)
    return path


def fill_with_heads(channel, codes):
    for i in range(HEADS):
        try:
            create_head(channel, f"h{i}", VOCAB, HIDDEN)
        except grpc.RpcError as error:
            codes[error.code().name] += 1
            return


def stream(target, key, codes):
    """A session's chunks, as fast as the server takes them, through a connection of its own."""
    options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    try:
        with grpc.insecure_channel(target, options) as channel:
            session = open_session(channel, "h0", key)
            rng = np.random.default_rng(1)
            rows = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
            labels = np.zeros(TOKENS, np.int64)
            requests = [start_request(session)] + [chunk_request(session, i, labels, rows) for i in range(1, CHUNKS + 1)]
            for _ in loss_pb2_grpc.LossServiceStub(channel).Compute(iter(requests), timeout=PATIENCE):
                pass
            codes["OK"] += 1
    except grpc.RpcError as error:
        codes[error.code().name] += 1


def read(target, codes):
    """Rows of weights that nobody takes."""
    channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
    call = head_pb2_grpc.HeadServiceStub(channel).ReadWeights(head_pb2.ReadWeightsRequest(head="h0"))
    try:
        call.initial_metadata()
    except grpc.RpcError as error:
        codes[error.code().name] += 1
    return channel


def burden(server, codes):
    with grpc.insecure_channel(server.target, OPTIONS) as channel:
        fill_with_heads(channel, codes)
        threads = [threading.Thread(target=stream, args=(server.target, f"s{i}", codes)) for i in range(STREAMS)]
        for thread in threads:
            thread.start()
        unread = [read(server.target, codes) for _ in range(STREAMS)]
        for thread in threads:
            thread.join()
        for reader in unread:
            reader.close()


def answers(target):
    with grpc.insecure_channel(target) as channel:
        try:
            status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(), timeout=PATIENCE)
            return True
        except grpc.RpcError:
            return False


def attack(binary, log_format):
    """What became of the server: a word, its exit status (None while it lives) and its log's last line."""
    codes = collections.Counter()
    server = LossdServer(binary, "--device=cpu", f"--log_format={log_format}")
    watch = threading.Timer(PATIENCE, lambda: server.signal(9))
    watch.start()
    try:
        with server:
            burden(server, codes)
            time.sleep(0.1)  # for one that is about to end
            status = server.poll()
            if status is None and not answers(server.target):
                status = server.poll()
            return f"served ({', '.join(f'{count} {code}' for code, count in sorted(codes.items()))})", status, server.log()
    except RuntimeError as error:
        return "did not start", server.poll(), str(error)
    finally:
        watch.cancel()


def last_line(log):
    return log.strip().splitlines()[-1] if log.strip() else ""


def verdict(status, log, log_format):
    """Why this end is not one that a server should have, or nothing."""
    if status is None:
        return ""
    last = last_line(log)
    if log_format == "json" and not last.startswith("{"):
        return f"status {status}, and not JSON: {last}"
    # What other threads say in the same moment may come behind it.
    said = log.strip().splitlines()[-3:]
    events = [json.loads(line)["event"] if log_format == "json" else line
              for line in said if line.startswith("{") or log_format != "json"]
    # Without room for its stack a thread cannot be started.
    if status == OUT_OF_MEMORY and any("out of memory: ended" in event or "no thread could be started: ended" in event
                                       for event in events):
        return ""
    if status == REFUSED and last:
        return ""
    return f"status {status}: {last}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--from", dest="first", type=int, default=50)
    parser.add_argument("--to", type=int, default=2000)
    parser.add_argument("--step", type=int, default=50)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()

    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for mib in range(args.first, args.to + 1, args.step):
            began = time.monotonic()
            log_format = ("text", "json")[mib // args.step % 2]
            what, status, log = attack(limited(folder, args.lossd, mib), log_format)
            why = verdict(status, log, log_format)
            wrong += bool(why)
            said = f"WRONG: {why}" if why else last_line(log)[:100] if status is not None else ""
            print(f"{mib} MiB: {what}, status {status}, {time.monotonic() - began:.1f} s  {said}", flush=True)
    if wrong and not args.report:
        sys.exit(f"{wrong} servers did not end as they should")


if __name__ == "__main__":
    main()
