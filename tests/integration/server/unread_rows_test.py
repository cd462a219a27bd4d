#!/usr/bin/python3
"""Streams of rows that nobody reads take no more of the server's memory than its limits say.

  unread_rows_test.py LOSSD [--streams N] [--allowed BYTES] [--report]

Opens streams that are never read, and fails if the server took more than --max_streams of them, or its resident memory
grew by more than is allowed. --report tells only, so that a server without limits can be measured.
"""
import argparse
import sys

import grpc
from lossd.v1 import head_pb2, head_pb2_grpc, status_pb2, status_pb2_grpc
from lossd_server import LossdServer
from waiting import wait_until

from streaming import create_head

MOST_STREAMS = 50
STAGING = 64 << 20
CHANNELS = 8


def resident(channel):
    """Once it is the same twice."""
    status = status_pb2_grpc.StatusServiceStub(channel)
    last = -1

    def steady():
        nonlocal last
        memory = status.GetMemory(status_pb2.GetMemoryRequest())
        before, last = last, memory.process_resident_bytes
        return abs(last - before) < 1 << 20 and memory

    return wait_until(steady, "memory that is the same twice", every=0.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--allowed", type=int, default=128 << 20)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()

    flags = (f"--max_streams={MOST_STREAMS}", f"--staging_bytes={STAGING}", "--lane_credit_bytes=16777216")
    with LossdServer(args.lossd, *flags) as server:
        # Windows of HTTP/2 that do not grow: gRPC would take a whole stream in, unread, and the server be done with it.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        channels = [grpc.insecure_channel(server.target, options=[*options, ("id", i)]) for i in range(CHANNELS)]
        create_head(channels[0], "h", 4096, 2048)
        before = resident(channels[0]).process_resident_bytes
        stubs = [head_pb2_grpc.HeadServiceStub(channel) for channel in channels]
        calls = [stubs[i % CHANNELS].ReadWeights(head_pb2.ReadWeightsRequest(head="h")) for i in range(args.streams)]
        for call in calls:
            call.initial_metadata()  # the server has heard of it
        after = resident(channels[0])
        refused = [call for call in calls if call.done()]
        growth = after.process_resident_bytes - before
        print(f"{args.streams} streams, {len(refused)} refused: {growth:,} bytes more than {before:,}")
        if args.report:
            return
        if after.row_streams != args.streams - len(refused) or after.row_streams > MOST_STREAMS:
            sys.exit(f"the server has {after.row_streams} streams of rows")
        if any(call.code() != grpc.StatusCode.RESOURCE_EXHAUSTED for call in refused):
            sys.exit(f"refused: {refused[0]}")
        if growth > args.allowed:
            sys.exit(f"the server's memory grew by {growth:,} bytes")
        for call in calls:
            call.cancel()


if __name__ == "__main__":
    main()
