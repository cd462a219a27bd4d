"""What the script tests of groups share: the processes of a group, as its parents' logs have them."""
import json
import re

import grpc
from lossd.v1 import head_pb2, head_pb2_grpc

from streaming import F32

RANKS = re.compile(r"started the ranks of a group epoch=(\d+) ranks=(\[.*\])")


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def epochs(log):
    """The processes of each epoch, by rank, as the parent's log has them."""
    return [[rank["pid"] for rank in json.loads(found.group(2))] for found in RANKS.finditer(log)]


def list_heads(target):
    with grpc.insecure_channel(target) as channel:
        stub = head_pb2_grpc.HeadServiceStub(channel)
        return stub.ListHeads(head_pb2.ListHeadsRequest(), wait_for_ready=True).heads


def read_weights(channel, head):
    request = head_pb2.ReadWeightsRequest(head=head, dtype=F32)
    stub = head_pb2_grpc.HeadServiceStub(channel)
    return b"".join(piece.weights for piece in stub.ReadWeights(request, wait_for_ready=True))
