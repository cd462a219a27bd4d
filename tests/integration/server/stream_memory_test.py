#!/usr/bin/python3
"""Peak memory of the server does not depend on how many tokens stream through it.

  stream_memory_test.py LOSSD [--tokens N] [--vocab V] [--hidden H] [--allowed BYTES] [--json]

Prints the server's peak resident memory after the first 4,096 tokens and after all, and fails if it grew by more.
"""
import argparse
import json
import sys

import grpc
import numpy as np
from lossd.v1 import loss_pb2_grpc, status_pb2, status_pb2_grpc
from lossd_server import LossdServer

from streaming import OPTIONS, chunk_request, create_head, open_session, start_request

FIRST = 4096


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossd")
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of one chunk")
    parser.add_argument("--allowed", type=int, default=64 << 20, help="bytes the peak may grow by")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    with LossdServer(args.lossd) as server, grpc.insecure_channel(server.target, options=OPTIONS) as channel:
        create_head(channel, "h", args.vocab, args.hidden)
        session = open_session(channel, "h", "stream")
        status = status_pb2_grpc.StatusServiceStub(channel)
        rng = np.random.default_rng(2)

        def requests():
            yield start_request(session)
            for sequence in range(1, args.tokens // args.chunk + 1):
                yield chunk_request(session, sequence, rng.integers(0, args.vocab, args.chunk),
                                    rng.standard_normal((args.chunk, args.hidden), dtype=np.float32))

        def peak():
            return status.GetMemory(status_pb2.GetMemoryRequest()).process_peak_bytes

        tokens, after_first = 0, 0
        for response in loss_pb2_grpc.LossServiceStub(channel).Compute(requests()):
            if not response.HasField("applied"):
                continue
            before, tokens = tokens, response.applied.applied * args.chunk
            if before < FIRST <= tokens:
                after_first = peak()
            if sys.stderr.isatty():
                print(f"\r{tokens} of {args.tokens} tokens", end="", file=sys.stderr)
        after_all = peak()

    report = {"tokens": tokens, "vocab": args.vocab, "hidden": args.hidden, "peak_after_first": after_first,
              "peak_after_all": after_all, "growth": after_all - after_first, "allowed": args.allowed}
    print(json.dumps(report) if args.json else "\n".join(f"{key:18}{value:>16,}" for key, value in report.items()))
    if tokens != args.tokens // args.chunk * args.chunk:
        sys.exit(f"only {tokens} tokens were applied")
    if after_all - after_first > args.allowed:
        sys.exit("the server's peak memory grew with the number of tokens")


if __name__ == "__main__":
    main()
