#!/usr/bin/python3
"""A group over four hosts that launchers start: torchrun and Open MPI's mpirun themselves, LeaderWorkerSet and Slurm by the
variables that they set. It serves, adds up gradients without an error, is ready at every host, and ends as one when one node is told to.

usage: launchers_test.py LOSSD TORCHRUN
"""
from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import unittest
from pathlib import Path

import grpc
import lossd
import numpy as np
from standard_services import SERVING, health

from group import HEALTH_PORT, Group
from hosts import Hosts, isolate
from programs import Program
from oracle import Oracle, check_exact, check_equal, exact_batch, exact_weights, valid_tokens

HOSTS = 4
VOCAB, HIDDEN, TOKENS = 256, 64, 100
Nodes = list[tuple[list[str], dict[str, str]]]  # command and variables of what is started on each host; where none is, nothing


def train(target: str) -> None:
    """Numbers of which every sum is exact: a rank that adds none of its part, or adds it twice, shows."""
    rng = np.random.default_rng(1)
    weights = exact_weights(rng, VOCAB, HIDDEN)
    batches = [exact_batch(rng, TOKENS, VOCAB, HIDDEN, slice(0, HIDDEN // 2)) for _ in range(3)]
    oracle = Oracle(weights)
    with lossd.connect(target) as client:
        head = client.create_head("trained", VOCAB, HIDDEN, "float32")
        head.write_weights(weights)
        with head.open_session() as session:
            for batch in batches:
                check_exact("dX", session.compute(batch.hidden, batch.labels).dx, oracle.losses_and_dx(batch)[1])
        flushed = head.flush()
        check_equal("window_tokens", flushed.window_tokens, valid_tokens(batches))
        check_exact("dW", flushed.gradient, oracle.weight_gradient(batches))


def is_ready(target: str) -> bool:
    with grpc.insecure_channel(target) as channel:
        try:
            return health(channel) == SERVING
        except grpc.RpcError:
            return False


def lossd_nodes() -> list[int]:
    """Processes of lossd whose parent is none."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text(encoding="ascii").split(" (", 1)
        except OSError:
            continue  # it has ended
        name, rest = rest.rsplit(") ", 1)
        if name == "lossd":
            found[int(pid)] = int(rest.split()[1])
    return [pid for pid, parent in found.items() if parent not in found]


class LaunchersTest(unittest.TestCase):
    def setUp(self) -> None:
        self.hosts = self.enterContext(Hosts(HOSTS))
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.group = Group(BINARY, self.folder, self.hosts)

    def lossd(self, launcher: str, *flags: str) -> list[str]:
        return [BINARY, f"--group={launcher}", *flags, *self.group.flags()]

    def check(self, nodes: Nodes, count: int = HOSTS) -> None:
        """`count`: on how many hosts there is a lossd then."""
        environment = {**self.group.environment(), "TMPDIR": str(self.folder)}
        programs = [self.enterContext(Program(*host.command(*command), log=self.folder / "log", env={**environment, **variables}))
                    for host, (command, variables) in zip(self.hosts, nodes)]
        for host in list(self.hosts)[:count]:
            programs[0].wait_until(lambda: is_ready(f"{host.address}:{HEALTH_PORT}"), f"{host.name} is ready")
        train(self.group.target)
        pids = lossd_nodes()
        self.assertEqual(len(pids), count)
        os.kill(max(pids), signal.SIGTERM)
        self.assertEqual([program.wait() for program in programs], [0] * len(programs), programs[0].log())

    def test_torchrun(self) -> None:
        """Two hosts are enough: each torchrun takes seconds to load PyTorch."""
        self.check([([TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=node0",
                      "--master-port=29500", "--no-python", *self.lossd("torchrun")], {}) for node in range(2)], count=2)

    def test_mpirun(self) -> None:
        """It starts what it needs on other hosts by a program like rsh."""
        shell = self.folder / "shell"
        ways = "".join(f"{host.name}) exec {shlex.join(host.command('sh', '-c'))} \"$*\" ;;\n" for host in self.hosts)
        shell.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{ways}esac\n", encoding="ascii")
        shell.chmod(0o700)
        self.check([(["mpirun", "--allow-run-as-root", "--host", ",".join(host.name for host in self.hosts),
                      "--mca", "plm_rsh_agent", str(shell), "--mca", "oob_tcp_if_include", "eth0", "-x", "OMP_NUM_THREADS",
                      *self.lossd("ompi", "--group_leader=node0")], {})])

    def test_leader_worker_set(self) -> None:
        self.check([(self.lossd("lws"), {"LWS_GROUP_SIZE": str(HOSTS), "LWS_WORKER_INDEX": str(node), "LWS_LEADER_ADDRESS": "node0"})
                    for node in range(HOSTS)])

    def test_slurm(self) -> None:
        self.check([(self.lossd("slurm"), {
            "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(HOSTS), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(node), "SLURM_NNODES": str(HOSTS), "SLURM_STEP_NODELIST": "node[0-3]",
            "SLURM_JOB_NODELIST": "node[0-3],other", "SLURM_TASKS_PER_NODE": "1(x5)", "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
            "SLURMD_NODENAME": f"node{node}"}) for node in range(HOSTS)])


if __name__ == "__main__":
    isolate()
    BINARY, TORCHRUN = sys.argv[1:3]
    del sys.argv[1:3]
    unittest.main()
