"""A trainer that goes on whatever happens to its connections and its server, as a process of the fault soak (faults.py).

What it knows to be in the window is what calls have answered. Every loss, dX, dW, weight, mark and count of tokens is
compared with what must be there, to the last bit, and so is what the server has after it went back to a checkpoint.
"""
from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import lossd
import numpy as np

from clients import Client
from fault_page import PHASES, FaultPage
from oracle import Batch, Oracle, check_close, check_equal, check_exact, exact_batch, exact_weights, valid_tokens

VOCAB, HIDDEN, TOKENS = 256, 64, 120
KEYS = HIDDEN // 2  # columns of hidden states that are not 0
COLUMNS_OF_A_STEP = 2  # of them, where a step changes their weights
LEARNING_RATE = 2.0**-4
PHASE_OF_CALL = {"compute": "computing", "result_of": "computing", "flush": "flushing", "commit_flush": "flushing",
                 "abort_flush": "flushing", "step": "stepping", "save_checkpoint": "saving"}
TRANSIENT = (lossd.UnavailableError, lossd.DeadlineExceededError)
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """How a client works."""

    dtype: str = "float32"
    lanes: int = 1
    sessions: int = 1
    steps: bool = False
    deterministic: bool = False
    held_hidden_bytes: int = 0  # of each session; with them, batches have two phases
    head: dict[str, Any] = field(default_factory=dict)
    reconnect_timeout: float = 120
    call_timeout: float = 60


KINDS = {
    "plain": Kind(),
    "lanes": Kind(lanes=4, head={"bias": True}),
    "impatient": Kind(lanes=2, reconnect_timeout=0.2, call_timeout=2),
    "deterministic": Kind(dtype="bfloat16", lanes=2, deterministic=True),
    "steps": Kind(lanes=2, steps=True),
    "impatient_steps": Kind(steps=True, reconnect_timeout=0.1, call_timeout=1),
    "pair": Kind(sessions=2, dtype="bfloat16", head={"double_buffer": True}),
    "phases": Kind(dtype="bfloat16", lanes=2, held_hidden_bytes=1 << 16),
    "deterministic_phases": Kind(lanes=2, deterministic=True, held_hidden_bytes=1 << 14),
}


@dataclass
class Contribution:
    """What the server has accepted of each lane of one session, and what that is of the window: batches, and how many tokens it
    has placed."""

    accepted: list[int]
    place: int = 0
    batches: list[Batch] = field(default_factory=list)


@dataclass
class State:
    """What a trainer would save beside a checkpoint of its head."""

    weights: np.ndarray
    contributions: list[Contribution] = field(default_factory=list)
    generation: int = 0
    windows: int = 0
    steps_since_write: int = 0

    @property
    def batches(self) -> list[Batch]:
        """All that are in the window."""
        return [batch for contribution in self.contributions for batch in contribution.batches]

    def put_batches(self, batches: list[list[Batch]]) -> list[list[Batch]]:
        """Each session's in the window, in the place of those that are returned."""
        before = [contribution.batches for contribution in self.contributions]
        for contribution, its_batches in zip(self.contributions, batches):
            contribution.batches = its_batches
        return before


class ServerWentBack(Exception):
    """The server is another one than that which has what this trainer sent."""


class FaultTrainer(Client):
    kinds = KINDS

    def __init__(self, connect: Callable[[Kind], lossd.Client], target: str, kind: str, number: int, seed: int, page: FaultPage) -> None:
        self.kind, self.target = kind, target
        self.work_as = self.kinds[kind]
        super().__init__(lambda: connect(self.work_as), number)
        self.page, self.way = page, number
        self.rng = np.random.default_rng([seed, number])
        self.seen: Counter[str] = Counter()
        self.head_name = f"{kind}-{number}"
        self.tag, self.saved = "", None
        self.incarnation, self.kills_seen = "", 0
        self.client: lossd.Client | None = None
        self.holds = 0
        self.later: list[list[Batch]] | None = None  # while a flush holds the window: what each session has in the next one

    # Calls

    @contextlib.contextmanager
    def under_way(self, call: str = "compute") -> Iterator[None]:
        self.page.phases[self.way] = PHASES.index(PHASE_OF_CALL.get(call, "other"))
        self.page.under_way[self.way] += 1
        try:
            yield
        finally:
            self.page.under_way[self.way] -= 1
            self.page.progress[self.way] += 1

    def once(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """An error that is not one of the network's is allowed if the server was killed meanwhile."""
        try:
            with self.under_way(function.__name__):
                return function(*arguments, **options)
        except (*TRANSIENT, lossd.WindowLostError):
            raise
        except lossd.LossdError as error:
            if self.may_have_gone_back():
                raise ServerWentBack from error
            raise

    def may_have_gone_back(self) -> bool:
        return bool(self.incarnation) and self.again(self.client.status).incarnation != self.incarnation

    def again(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """For calls that may be repeated as they are."""
        while True:
            try:
                return self.once(function, *arguments, **options)
            except TRANSIENT as error:
                self.gave_up(error)

    def gave_up(self, error: lossd.LossdError) -> None:
        self.seen[f"gave up: {error.code}"] += 1
        time.sleep(0.01)

    # Beginning and end

    def work(self) -> None:
        self.client = self.again(self.connect)
        self.prepare(self.client)
        print(json.dumps({"ready": self.way}), flush=True)
        while not self.page.stopping:
            self.guarded(self.round)
            self.rounds += 1
        while not self.guarded(self.finish):
            pass
        self.client.close()

    def guarded(self, part: Callable[[], None]) -> bool:
        """Whether it came to its end; otherwise it has been undone, back to the checkpoint, as the server's part has."""
        try:
            part()
            return True
        except (lossd.WindowLostError, ServerWentBack) as error:
            self.require_kill(error)
        while True:
            try:
                self.go_back()
                return False
            except (lossd.WindowLostError, ServerWentBack) as error:
                self.require_kill(error)

    def require_kill(self, error: Exception) -> None:
        if not self.was_killed():
            raise AssertionError(f"window lost, but nobody has killed the server: {error!r}") from error
        self.seen["window lost"] += 1

    def was_killed(self) -> bool:
        """Since this trainer began, or went back."""
        return self.page.kills != self.kills_seen or self.page.kills % 2 == 1

    def prepare(self, client: lossd.Client) -> None:
        head_options = dict(self.work_as.head)
        if self.work_as.steps:
            head_options["optimizer"] = lossd.SGD()
        self.head = self.again(client.create_head, self.head_name, VOCAB, HIDDEN, self.work_as.dtype, **head_options)
        self.state = State(exact_weights(self.rng, VOCAB, HIDDEN))
        self.write_weights()
        self.sessions = [self.open_session(number) for number in range(self.work_as.sessions)]
        self.state.contributions = [Contribution(accepted_of(session)) for session in self.sessions]
        self.state.generation = self.again(self.head.info).generation
        self.incarnation = self.again(client.status).incarnation
        self.save()

    def open_session(self, number: int) -> lossd.Session:
        return self.again(self.head.open_session, client_key=f"{self.head_name}/{number}", rank=number,
                          lanes=self.work_as.lanes, chunk_bytes=2048, deterministic=self.work_as.deterministic,
                          held_hidden_bytes=self.work_as.held_hidden_bytes)

    def finish(self) -> None:
        self.consume()
        self.count_lanes()
        check_equal("window_tokens in the end", self.again(self.head.info).window_tokens, 0)
        check_exact("a weight in the end", self.read_weights(), self.state.weights)
        self.close_sessions()
        self.delete_head()

    def delete_head(self) -> None:
        """Where a call had no answer the head may be gone."""
        try:
            self.once(self.client.delete_head, self.head_name)
        except TRANSIENT as error:
            self.gave_up(error)
            with contextlib.suppress(lossd.NotFoundError):
                self.again(self.client.delete_head, self.head_name)

    def close_sessions(self) -> None:
        for session in self.sessions:
            try:
                self.once(session.close)
            except TRANSIENT:
                pass  # its lease will end

    def count_lanes(self) -> None:
        for session in self.sessions:
            for place in session.lane_places():
                self.seen["lanes at the target" if place["target"] == self.target else "lanes elsewhere"] += 1

    # One window

    def round(self) -> None:
        self.count_lanes()
        for _ in range(int(self.rng.integers(1, 4))):
            self.compute()
            if self.rng.random() < 0.08:
                self.save()
        if self.rng.random() < 0.03:
            self.go_back()
            self.seen["went back by itself"] += 1
        self.consume()
        if self.rng.random() < 0.2:
            self.ask_for_logits()

    def columns(self) -> slice:
        """The columns of hidden states that are not 0; none whose weights a step has changed."""
        if not self.work_as.steps:
            return slice(0, KEYS)
        first = self.state.steps_since_write * COLUMNS_OF_A_STEP
        return slice(first, first + COLUMNS_OF_A_STEP)

    def new_batch(self) -> Batch:
        return exact_batch(self.rng, int(self.rng.integers(1, TOKENS)), VOCAB, HIDDEN, self.columns())

    def compute(self) -> None:
        """A batch of each session, at the same time; of a deterministic one sometimes two, the second one first."""
        places = [contribution.place for contribution in self.state.contributions]
        if self.work_as.deterministic and self.rng.random() < 0.3:
            first, second = self.new_batch(), self.new_batch()
            self.send([second], [places[0] + len(first.labels)])
            self.send([first], places)
        else:
            self.send([self.new_batch() for _ in self.sessions], places)

    def send(self, batches: list[Batch], places: list[int]) -> None:
        oracle = Oracle(self.state.weights)
        options = [self.batch_options(place) for place in places]
        if self.work_as.held_hidden_bytes:
            for number, batch in enumerate(batches):
                options[number]["hold"] = self.first_phase(oracle, number, batch)
        with self.under_way():
            futures = [session.compute_async(batch.hidden, batch.labels, **option)
                       for session, batch, option in zip(self.sessions, batches, options)]
            errors = [future.exception() for future in futures]
        for number, (batch, future, error) in enumerate(zip(batches, futures, errors)):
            result = self.once(self.result_of, number, batch, options[number], future, error)
            self.check_result(oracle, batch, result)
            self.put_in_window(number, batch, places[number])

    def first_phase(self, oracle: Oracle, number: int, batch: Batch) -> int:
        """Returns the batch's number. What a lost connection leaves of this phase does not matter."""
        self.holds += 1
        try:
            with self.under_way():
                result = self.sessions[number].compute(batch.hidden, batch.labels, mode="loss", hold=self.holds)
            check_close("a loss of phase one", result.losses, oracle.losses_and_dx(batch)[0])
            self.seen["first phases"] += 1
        except TRANSIENT as error:
            self.gave_up(error)
            self.sessions[number] = session = self.open_session(number)
            self.require_same(number, session)
            self.seen["sessions opened again"] += 1
        self.state.contributions[number].accepted = accepted_of(self.sessions[number])
        return self.holds

    def check_result(self, oracle: Oracle, batch: Batch, result: lossd.BatchResult) -> None:
        losses, dx = oracle.losses_and_dx(batch)
        check_close("a loss", result.losses, losses)
        check_exact("dX", result.dx, dx)
        self.seen["repeated chunks"] += result.repeated_chunks
        self.tokens += len(batch.labels)

    def put_in_window(self, number: int, batch: Batch, place: int) -> None:
        contribution = self.state.contributions[number]
        contribution.accepted = accepted_of(self.sessions[number])
        contribution.place = max(contribution.place, place + len(batch.labels))
        contribution.batches.append(batch)

    def batch_options(self, place: int) -> dict[str, Any]:
        where = {"window_token": place} if self.work_as.deterministic else {}
        return {"weight_version": self.version, "dx_dtype": "float32", **where}

    def result_of(self, number: int, batch: Batch, options: dict[str, Any], future: Any,
                  error: BaseException | None) -> lossd.BatchResult:
        """The result of a batch whose session may be over: what of it counts is for the server to say."""
        if error is None:
            return future.result()
        while isinstance(error, TRANSIENT):
            self.gave_up(error)
            self.sessions[number] = session = self.open_session(number)
            self.require_same(number, session)
            self.seen["sessions opened again"] += 1
            session.resume_at([sequence + 1 for sequence in self.state.contributions[number].accepted])
            try:
                with self.under_way():
                    return session.compute(batch.hidden, batch.labels, **options)
            except lossd.LossdError as next_error:
                error = next_error
        raise error

    def require_same(self, number: int, session: lossd.Session) -> None:
        """After a session was opened, in the place of that of this number: that is true of whichever server there is."""
        if self.again(self.client.status).incarnation != self.incarnation:
            raise ServerWentBack

    def consume(self) -> None:
        if not self.state.batches:
            return
        gradient = Oracle(self.state.weights).weight_gradient(self.state.batches)
        if self.work_as.steps:
            self.step(gradient)
        elif self.head.config.double_buffer and not self.page.stopping:
            self.flush_beside(gradient)
        else:
            self.flush(gradient)

    def end_window(self) -> None:
        """As soon as it is known to have ended."""
        self.state.put_batches(self.later or [[] for _ in self.state.contributions])
        self.later = None
        self.state.windows += 1
        self.state.generation += 1
        for contribution in self.state.contributions:
            contribution.place = 0
        self.seen["windows"] += 1

    def step(self, gradient: np.ndarray) -> None:
        stepped = self.again(self.head.step, LEARNING_RATE)
        check_equal("window_tokens of a step", stepped.window_tokens, valid_tokens(self.state.batches))
        self.end_by_step(gradient, stepped.weight_version)
        check_exact("a weight after a step", self.read_weights(), self.state.weights)
        if self.state.steps_since_write * COLUMNS_OF_A_STEP >= KEYS:
            self.begin_anew()

    def end_by_step(self, gradient: np.ndarray, version: int) -> None:
        self.version = version
        self.state.weights = self.state.weights - LEARNING_RATE * gradient
        self.state.steps_since_write += 1
        self.end_window()

    def begin_anew(self) -> None:
        self.state.weights = exact_weights(self.rng, VOCAB, HIDDEN)
        self.state.steps_since_write = 0
        self.write_weights()

    def flush(self, gradient: np.ndarray) -> None:
        """In one of the ways there are, until dW has been read and the window has ended."""
        ways = (self.flush_at_once, self.flush_by_rows, self.flush_and_commit)
        flushed, bias = ways[int(self.rng.integers(len(ways)))]()
        bias_gradient = self.bias_gradient()
        self.end_window()
        check_exact("dW", flushed, gradient)
        if bias is not None:
            check_exact("db", bias, bias_gradient)

    def bias_gradient(self) -> np.ndarray:
        counts = np.zeros(VOCAB)
        for batch in self.state.batches:
            labels = batch.labels[batch.labels >= 0]
            counts += len(labels) / VOCAB - np.bincount(labels, minlength=VOCAB)
        return counts

    def flush_at_once(self, **options: Any) -> tuple[np.ndarray, np.ndarray | None]:
        gradient = np.empty((VOCAB, HIDDEN), np.float32)
        bias = np.empty(VOCAB, np.float32) if self.head.config.bias else None
        while True:
            try:
                flushed = self.once(self.head.flush, gradient, bias_out=bias, **options)
                break
            except TRANSIENT as error:
                self.gave_up(error)
                if error.flush_id:  # all of dW was read
                    return self.commit(error.flush_id, gradient, bias)
        check_equal("window_tokens of a flush", flushed.window_tokens, valid_tokens(self.state.batches))
        if options.get("commit", True):
            return gradient, bias
        return self.commit(flushed.flush_id, gradient, bias)

    def commit(self, flush_id: str, gradient: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        self.again(self.head.commit_flush, flush_id)
        return gradient, bias

    def flush_by_rows(self) -> tuple[np.ndarray, np.ndarray | None]:
        gradient = np.empty((VOCAB, HIDDEN), np.float32)
        bias = np.empty(VOCAB, np.float32) if self.head.config.bias else None

        def take(first: int, rows: np.ndarray, bias_rows: np.ndarray | None) -> None:
            gradient[first:first + len(rows)] = rows
            if bias is not None:
                bias[first:first + len(rows)] = bias_rows

        while True:
            try:
                self.once(self.head.flush, sink=take)
                return gradient, bias
            except TRANSIENT as error:
                self.gave_up(error)
                if error.flush_id:
                    return self.settle(gradient, bias)

    def settle(self, gradient: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """A flush whose commit had no answer: the next call says what became of it, and does nothing else."""
        while True:
            try:
                self.once(self.head.flush)
            except lossd.AlreadyExistsError:
                return gradient, bias
            except TRANSIENT as error:
                self.gave_up(error)
            else:
                raise AssertionError("a flush behind one whose commit had no answer did not say that it is committed now")

    def flush_beside(self, gradient: np.ndarray) -> None:
        """While the window is held, the next one begins."""
        flushed = np.empty((VOCAB, HIDDEN), np.float32)
        held = self.again(self.head.flush, flushed, commit=False)
        check_exact("dW", flushed, gradient)
        check_equal("window_tokens of a flush", held.window_tokens, valid_tokens(self.state.batches))
        batches = self.state.put_batches([[] for _ in self.sessions])
        try:
            self.compute()
        finally:
            self.later = self.state.put_batches(batches)
        self.again(self.head.commit_flush, held.flush_id)
        self.end_window()

    def flush_and_commit(self) -> tuple[np.ndarray, np.ndarray | None]:
        """With a look at it in between; and sometimes with a second thought."""
        if self.rng.random() < 0.5:
            held = self.flush_held()
            self.again(self.head.abort_flush, held)
        return self.flush_at_once(commit=False)

    def flush_held(self) -> str:
        return str(self.again(self.head.flush, np.empty((VOCAB, HIDDEN), np.float32), commit=False).flush_id)

    # Weights

    def bias(self) -> np.ndarray | None:
        return np.zeros(VOCAB, np.float32) if self.head.config.bias else None

    def write_weights(self) -> None:
        weights = self.state.weights.astype(np.float32)
        if self.rng.random() < 0.5:
            self.version = self.again(self.head.write_weights, weights, self.bias())
        else:
            self.version = self.write_in_parts(weights)
        check_exact("a weight that was written", self.read_weights(), self.state.weights)

    def write_in_parts(self, weights: np.ndarray) -> int:
        while True:
            try:
                write = self.again(self.head.begin_write, f"{self.rng.integers(1 << 62)}")
                for first in range(0, VOCAB, VOCAB // 4):
                    rows = slice(first, first + VOCAB // 4)
                    self.again(write.write_rows, first, weights[rows], None if self.bias() is None else self.bias()[rows])
                return self.again(write.commit)
            except (lossd.NotFoundError, lossd.FailedPreconditionError):  # a drain keeps nothing that is not published
                self.seen["weights begun again"] += 1

    def read_weights(self) -> np.ndarray:
        return self.again(self.head.read_rows, 0, VOCAB, weight_version=self.version)

    def ask_for_logits(self) -> None:
        hidden = np.zeros((4, HIDDEN), np.float32)
        hidden[:, KEYS:] = self.rng.integers(-3, 4, (4, KEYS))
        logits = self.again(self.head.logits, hidden, weight_version=self.version)
        check_exact("a logit", logits, Oracle(self.state.weights).logits(hidden))

    # Checkpoints

    def save(self) -> None:
        """What there was before stays the one to go back to until this one is known to be whole."""
        tag = "b" if self.tag == "a" else "a"
        state = deepcopy(self.state)
        info = self.again(self.save_checkpoint, tag).info
        check_equal("the generation of a checkpoint", info.generation, state.generation)
        check_equal("window_tokens of a checkpoint", info.window_tokens, valid_tokens(state.batches))
        self.tag, self.saved = tag, state
        self.seen["checkpoints"] += 1

    def save_checkpoint(self, tag: str) -> lossd.SavedCheckpoint:
        return self.head.save_checkpoint(tag)

    def go_back(self) -> None:
        """To where the last checkpoint was saved, the server and this one."""
        self.kills_seen, self.incarnation = self.page.kills, ""
        self.incarnation = self.again(self.client.status).incarnation
        self.again(self.client.restore_checkpoint, self.head_name, self.tag)
        self.head = self.again(self.client.head, self.head_name)
        self.sessions = [self.open_session(number) for number in range(len(self.sessions))]
        info = self.again(self.head.info)
        for number, session in enumerate(self.sessions):
            self.require_same(number, session)
        self.state, self.version, self.later = deepcopy(self.saved), info.weight_version, None
        self.seen["went back"] += 1
        check_equal("the generation after a restore", info.generation, self.state.generation)
        check_equal("window_tokens after a restore", info.window_tokens, valid_tokens(self.state.batches))
        for session, contribution in zip(self.sessions, self.state.contributions):
            check_equal("marks after a restore", accepted_of(session), contribution.accepted)
        check_exact("a weight after a restore", self.read_weights(), self.state.weights)


def accepted_of(session: lossd.Session) -> list[int]:
    return [lane["accepted"] for lane in json.loads(session.marks())["lanes"]]


def main(trainer_of: type[FaultTrainer] = FaultTrainer) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=trainer_of.kinds)
    parser.add_argument("target")
    parser.add_argument("--ca", default="", help="TLS, with certificates of this authority")
    parser.add_argument("--way", type=int, required=True)
    parser.add_argument("--ways", type=int, required=True)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def connect(kind: Kind) -> lossd.Client:
        tls = lossd.Tls(ca_certificates=options.ca, server_name="localhost") if options.ca else None
        return lossd.connect(options.target, tls=tls, reconnect_timeout=kind.reconnect_timeout, call_timeout=kind.call_timeout)

    trainer = trainer_of(connect, options.target, options.kind, options.way, options.seed, FaultPage(options.page, options.ways))
    trainer.run()
    if trainer.failure:
        sys.exit(trainer.failure)
    print(json.dumps({"client": trainer.head_name, "rounds": trainer.rounds, "tokens": trainer.tokens, **trainer.seen}))


if __name__ == "__main__":
    main()
