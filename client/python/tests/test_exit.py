"""Processes that end with everything still open print nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BEGIN = """
import numpy as np, lossd
server = lossd.launch("cpu"); client = server.client()
head = client.create_head("a", 64, 16); head.write_weights(np.zeros((64, 16), "f4"))
hidden, labels = np.ones((6, 16), "f4"), np.arange(6)
session = head.open_session()
"""
_TORCH = """
import copy, torch, warnings
from lossd.torch import RemoteHead, linear_cross_entropy
warnings.simplefilter("ignore")
remote = RemoteHead(head)
linear_cross_entropy(torch.ones(6, 16, requires_grad=True), torch.arange(6), remote).backward()
another = copy.deepcopy(remote)
loss = linear_cross_entropy(torch.ones(6, 16, requires_grad=True), torch.arange(6), remote)
"""
ENDS = {
    "session": "session.compute(hidden, labels)",
    "cycle": "session.compute(hidden, labels); session.itself = session; head.itself = head; client.itself = client",
    "future": "future = session.compute_async(hidden, labels)",
    "exit": "session.compute(hidden, labels); raise SystemExit(0)",
    "server gone": "session.compute(hidden, labels); server.process.kill(); server.process.wait()",
    "stopped": "session.compute(hidden, labels); server.stop()",
    "region": "region = client.create_region('system', 4096)",
    "torch": _TORCH,
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_printed_at_exit(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", _BEGIN + ENDS[end]], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
