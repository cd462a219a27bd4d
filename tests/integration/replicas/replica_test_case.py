"""What the script tests of replicas share: a set of servers, what they are trained with, and what one server makes of it."""
from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from lossd.v1 import gradient_pb2, head_pb2
from lossd_server import LossdServer

from replica_client import Batch, Code, Server, Session, Trainer, WentBack, again
from replica_servers import ReplicaServers

FLAGS = ("--workspace_bytes=16M", "--drain_timeout=10m")
VOCAB, HIDDEN, TOKENS = 96, 24, 40
RATE = 0.02
ADAMW = head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_ADAMW)


def weights(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((VOCAB, HIDDEN), dtype=np.float32) * np.float32(HIDDEN**-0.5)


def batch_of(step: int, client: int) -> Batch:
    """Labels follow from hidden states, so that there is something to learn."""
    rng = np.random.default_rng([step, client])
    hidden = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
    return hidden, (hidden @ weights(2).T).argmax(axis=1).astype(np.int64)


def code_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    try:
        call(*arguments, **options)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return Code.OK, ""


def parse() -> argparse.Namespace:
    """The command line of a test, without what is for unittest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lossd")
    parser.add_argument("--devices", default="cpu", help="of each replica; with commas each is a group")
    options, sys.argv[1:] = parser.parse_known_args()
    return options


def apply_step(server: Server, generation: int, sessions: list[Session]) -> Any:
    return server.gradients.ApplyStep(gradient_pb2.ApplyStepRequest(
        head="h", generation=generation, learning_rate=RATE, marks=[session.marks() for session in sessions]))


class TestCase(unittest.TestCase):
    options: argparse.Namespace  # as parse() has read them

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.sets = 0

    def start(self, replicas: int = 2, *flags: str) -> ReplicaServers:
        """They end with the test; what they have logged is part of a failure."""
        self.sets += 1
        servers = ReplicaServers(self.options.lossd, self.folder / f"set{self.sets}", replicas, *FLAGS, *flags, devices=self.options.devices)
        self.addCleanup(servers.close)
        servers.start()
        return servers

    def reach(self, servers: ReplicaServers) -> list[Server]:
        return [self.enterContext(contextlib.closing(Server(target))) for target in servers.targets]

    def open(self, servers: list[Server], keys: str = "ab") -> list[Session]:
        sessions = [Session(servers, "h", key) for key in keys]
        for session in sessions:
            self.addCleanup(session.close)
        return sessions

    def trained(self, servers: list[Server], steps: int, keys: str = "ab",
                before: Callable[[int, Trainer], None] = lambda step, trainer: None) -> tuple[np.ndarray, np.ndarray, list[Session]]:
        """Losses of all batches, and the weights in the end; steps are asked of one server after the other. `before`: each step, once.
        Where all go back to a checkpoint the steps after it are made again."""
        servers[-1].create("h", VOCAB, HIDDEN, optimizer=ADAMW)
        servers[0].write("h", weights())
        sessions = self.open(servers, keys)
        trainer = Trainer(servers, "h", sessions)
        losses: dict[tuple[int, int], np.ndarray] = {}
        step, seen = 0, -1
        while step < steps:
            if step > seen:
                before(step, trainer)
            seen = max(seen, step)
            try:
                for client, session in enumerate(sessions):
                    losses[step, client], dx = session.compute(batch_of(step, client))
                    self.assertTrue(dx.any())
                stepped = trainer.step(servers[step % len(servers)], RATE)
            except WentBack:
                step = trainer.begin_again()
                continue
            step += 1
            self.assertEqual((stepped.window_tokens, stepped.step), (len(keys) * TOKENS, step))
        return np.concatenate([losses[place] for place in sorted(losses)]), again(servers[0].read, "h", HIDDEN), sessions

    def trained_by_one(self, steps: int, keys: str = "ab") -> tuple[np.ndarray, np.ndarray]:
        with LossdServer(self.options.lossd, "--device=cpu", *FLAGS) as one, contextlib.closing(Server(one.target)) as server:
            return self.trained([server], steps, keys)[:2]

    def assert_close(self, got: np.ndarray, expected: np.ndarray, what: str) -> None:
        off = np.abs(got - expected).max() / np.abs(expected).max()
        self.assertLessEqual(off, 1e-6, what)
