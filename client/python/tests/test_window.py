"""Flushes, steps, and whose marks they name."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lossd
from lossd import _library, _structs
from lossd._window import Contributor

MakeHead = Callable[..., lossd.Head]
V, H = 32, 16


def batch(tokens: int = 4, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.standard_normal((tokens, H), np.float32), random.integers(0, V, tokens)


def test_two_sessions_add_to_one_window(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()
    with head.open_session() as one, head.open_session(rank=1) as two:
        one.compute(hidden, labels)
        once = head.flush().gradient
        one.compute(hidden, labels)
        two.compute(hidden, labels)
        assert len(head.marks()) == 2
        both = head.flush()
    np.testing.assert_allclose(both.gradient, 2 * once, rtol=1e-5)
    assert both.window_tokens == 8


def test_sessions_that_are_over_are_named(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()
    with head.open_session() as session:
        session.compute(hidden, labels)
    dropped = head.open_session()
    dropped.compute(hidden, labels)
    del dropped
    assert len(head.marks()) == 2
    assert head.flush().window_tokens == 8
    assert head.marks() == []
    assert head.flush().window_tokens == 0


def test_discard_ends_the_window_and_reads_nothing(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(4096, H), batch()
    with head.open_session() as session:
        session.compute(hidden, labels)
        received = head.client.traffic().bytes_received
        dropped = head.discard()
        assert head.client.traffic().bytes_received - received < 4096  # [4096, 16] is 256 KiB
        assert dropped.window_tokens == 4 and dropped.norm > 0 and dropped.gradient is None
        assert head.info().window_tokens == 0 and not head.flush().gradient.any()
        session.compute(hidden, labels)
        with pytest.raises(lossd.FailedPreconditionError, match="mark"):
            head.discard(marks=[])
        assert head.flush().window_tokens == 4


def test_sessions_that_added_nothing_are_not_named(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()
    head.open_session().close()
    with head.open_session() as session:
        session.compute(hidden, labels)
        head.flush()
    assert head.marks() == []  # nothing since the flush
    assert head.flush().window_tokens == 0


def test_another_process_flushes(server: lossd.Server, make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()
    with head.open_session() as session, head.open_session() as live:
        session.compute(hidden, labels)
        live.compute(hidden, labels)
    with server.client() as other:
        assert other.head(head.name).flush(marks=head.marks()).window_tokens == 8
    assert head.marks() == []
    assert head.flush().window_tokens == 0


def test_marks_of_another_client_are_wanted(server: lossd.Server, make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()
    with server.client() as other, other.head(head.name).open_session() as session:
        session.compute(hidden, labels)
        with pytest.raises(lossd.FailedPreconditionError, match="do not name it"):
            head.flush()
        assert head.flush(marks=[session.marks()]).window_tokens == 4
    with pytest.raises(TypeError, match="want a list"):
        head.flush(marks="{}")
    with pytest.raises(lossd.InvalidArgumentError, match="marks"):
        head.flush(marks=["no JSON"])


def test_a_session_is_opened_again(server: lossd.Server, make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()
    first = head.open_session(client_key="trainer 1")
    result = first.compute(hidden, labels)
    second = head.open_session(client_key="trainer 1")
    assert second.client_key == "trainer 1" and second.session_id == first.session_id
    second.resume_at(result.first_sequences)
    again = second.compute(hidden, labels)
    assert again.repeated_chunks == again.chunks > 0
    assert np.array_equal(again.dx, result.dx)
    with pytest.raises(lossd.LossdError):  # it was taken over
        first.compute(hidden, labels)
    assert head.flush().window_tokens == 4
    third = head.open_session(client_key="trainer 1")  # what it had added is flushed
    third.close()
    assert head.marks() == []
    assert head.flush().window_tokens == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_flush_dtypes(make_head: MakeHead, dtype: str) -> None:
    import torch

    head, (hidden, labels) = make_head(), batch()
    with head.open_session() as session:
        session.compute(hidden, labels)
        wanted = torch.from_numpy(head.flush().gradient)
        session.compute(hidden, labels)
        out = torch.zeros(V, H, dtype=getattr(torch, dtype))
        result = head.flush(out, gradient_scale=0.5)
        assert result.gradient is out
        torch.testing.assert_close(out.float(), (wanted * 0.5).to(out.dtype).float(), rtol=1e-2, atol=1e-6)
        session.compute(hidden, labels)
        array = head.flush(dtype=dtype).gradient
    assert array.dtype == (np.uint16 if dtype == "bfloat16" else dtype)


def test_sink(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(200, H, bias=True), batch()
    got = np.zeros((200, H), np.float32)
    bias = np.zeros(200, np.float32)
    seen: list[tuple[int, int]] = []
    totals: list[tuple[int, int]] = []
    frozen: list[bool] = []

    def take(first: int, rows: Any, bias_rows: Any) -> None:
        seen.append((first, len(rows)))
        got[first : first + len(rows)] = rows
        bias[first : first + len(rows)] = bias_rows
        assert not rows.flags.writeable

    with head.open_session() as session:
        session.compute(hidden, labels)
        wanted = head.flush()
        session.compute(hidden, labels)
        result = head.flush(sink=take, progress=lambda *one: totals.append(one), on_frozen=lambda: frozen.append(True))
    assert result.gradient is None and frozen == [True]
    assert np.array_equal(got, wanted.gradient) and np.array_equal(bias, wanted.bias_gradient)
    assert [first for first, _ in seen] == list(np.cumsum([0, *(count for _, count in seen[:-1])]))
    assert totals and all(0 <= done <= total for done, total in totals)


def test_a_sink_that_raises_leaves_the_window_whole(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()

    def fail(first: int, rows: Any, bias: Any) -> None:
        raise ZeroDivisionError("mine")

    with head.open_session() as session:
        session.compute(hidden, labels)
        with pytest.raises(ZeroDivisionError, match="mine"):
            head.flush(sink=fail)
        with pytest.raises(ZeroDivisionError):
            head.flush(progress=fail_progress)
        with pytest.raises(ValueError, match="not both"):
            head.flush(np.zeros((V, H), np.float32), sink=fail)


def fail_progress(done: int, total: int) -> None:
    raise ZeroDivisionError


def test_a_flush_in_two_parts(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(double_buffer=True), batch()
    session = head.open_session()
    session.compute(hidden, labels)
    aborted = head.flush(commit=False)
    head.abort_flush(aborted.flush_id)
    kept = head.flush(commit=False)
    np.testing.assert_array_equal(kept.gradient, aborted.gradient)
    session.compute(hidden, labels)  # of the next window
    session.close()
    head.commit_flush(kept.flush_id)
    assert len(head.marks()) == 1
    assert head.flush().window_tokens == 4
    assert head.marks() == []


def test_fixed_segments(client: lossd.Client, make_head: MakeHead) -> None:
    assert not make_head().config.fixed_segments
    if client.status().device != "cpu":
        with pytest.raises(lossd.InvalidArgumentError, match="create the head without"):
            make_head(fixed_segments=True)
        return
    head, (hidden, labels) = make_head(fixed_segments=True), batch()
    assert head.config.fixed_segments
    with head.open_session() as session:
        session.compute(hidden, labels)
    assert head.flush().window_tokens == 4


OPTIMIZERS = [
    (lossd.SGD(momentum=0.9, dampening=0.1, weight_decay=0.01), "SGD"),
    (lossd.SGD(momentum=0.9, nesterov=True), "SGD"),
    (lossd.Adam(weight_decay=0.1), "Adam"),
    (lossd.AdamW(betas=(0.8, 0.99), eps=1e-6), "AdamW"),
]


@pytest.mark.parametrize("optimizer, name", OPTIMIZERS)
def test_steps_are_those_of_torch(make_head: MakeHead, optimizer: Any, name: str) -> None:
    import torch

    weights = np.random.default_rng(1).standard_normal((V, H), np.float32)
    head = make_head(weights=weights, optimizer=optimizer)
    assert head.config.optimizer == optimizer
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    reference = getattr(torch.optim, name)([parameter], **{**vars(optimizer), "lr": 0.01})
    with head.open_session() as session:
        for step in range(3):
            hidden, labels = batch(seed=step)
            session.compute(hidden, labels)
            stats = head.gradient_stats(gradient_scale=0.5)
            result = head.step(0.01 * (step + 1), gradient_scale=0.5)
            reference.param_groups[0]["lr"] = 0.01 * (step + 1)
            loss = torch.nn.functional.cross_entropy(
                torch.from_numpy(hidden) @ parameter.T, torch.from_numpy(labels), reduction="sum"
            )
            reference.zero_grad()
            (0.5 * loss).backward()
            assert result.norm == pytest.approx(parameter.grad.norm().item(), rel=1e-4)
            assert stats.norm == pytest.approx(result.norm, rel=1e-6) and stats.window_tokens == 4
            reference.step()
            assert (result.step, result.skipped, result.non_finite) == (step + 1, False, 0)
    torch.testing.assert_close(torch.from_numpy(head.read_weights()), parameter.detach(), rtol=1e-4, atol=1e-5)


def test_a_step_without_a_gradient_changes_nothing(make_head: MakeHead) -> None:
    """As torch.optim leaves a parameter alone whose grad is None."""
    head, (hidden, labels) = make_head(optimizer=lossd.SGD(momentum=0.9, weight_decay=0.5)), batch()
    with head.open_session() as session:
        session.compute(hidden, labels)
        head.step(0.1)
        before, version = head.read_weights(), head.info().weight_version
        for mode, targets in (("loss", labels), ("gradients", np.full(4, -100)), (None, labels)):
            if mode:
                session.compute(hidden, targets, mode=mode)
            generation = head.info().generation
            result = head.step(0.1)
            assert (result.skipped, result.step, result.weight_version) == (True, 1, version)
            assert (result.generation, result.window_tokens, result.norm) == (generation + 1, 0, 0)
            assert np.array_equal(head.read_weights(), before)
        session.compute(hidden, labels, gradient_scale=0.0)  # zeros are a gradient
        result = head.step(0.1)
        assert (result.skipped, result.step) == (False, 2)
        assert not np.array_equal(head.read_weights(), before)


def test_a_step_with_infinity_is_skipped(make_head: MakeHead) -> None:
    head = make_head(optimizer=lossd.AdamW())
    before = head.read_weights()
    with head.open_session() as session:
        session.compute(*batch(), gradient_scale=1e20)
        assert head.gradient_stats().non_finite == 0
        assert head.gradient_stats(gradient_scale=1e30).non_finite > 0
        result = head.step(0.1, gradient_scale=1e30, skip_non_finite=True)
    assert result.skipped and result.step == 0 and np.array_equal(head.read_weights(), before)


def test_a_step_of_a_named_window(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(optimizer=lossd.SGD()), batch()
    generation = head.info().generation
    with head.open_session() as session:
        session.compute(hidden, labels)
        marks = head.marks()
        first = head.step(0.1, generation=generation, marks=marks)
        again = head.step(0.1, generation=generation, marks=marks)
    assert again == first and head.info().optimizer_steps == 1


def test_step_overrides(make_head: MakeHead) -> None:
    head = make_head(optimizer=lossd.AdamW())
    before = head.read_weights()
    with head.open_session() as session:
        session.compute(*batch(), gradient_scale=0.0)
    head.step(0.1, weight_decay=0.5)
    np.testing.assert_allclose(head.read_weights(), before * (1 - 0.1 * 0.5), rtol=1e-6)
    with pytest.raises(lossd.InvalidArgumentError, match="beta1"):
        head.step(0.1, betas=(1.5, 0.9))


def test_deterministic_sessions(make_head: MakeHead) -> None:
    head = make_head()
    hidden, labels = batch(64)
    gradients = []
    for parts in ((64,), (16, 48), (32, 32)):
        with head.open_session(deterministic=True) as session:
            begin = 0
            for tokens in parts:
                session.compute(hidden[begin : begin + tokens], labels[begin : begin + tokens], window_token=begin)
                begin += tokens
        gradients.append(head.flush().gradient)
    assert np.array_equal(gradients[0], gradients[1]) and np.array_equal(gradients[0], gradients[2])


def test_two_phases_meet_the_same_weights(make_head: MakeHead) -> None:
    head, (hidden, labels) = make_head(), batch()
    with head.open_session() as session:
        first = session.compute(hidden, labels, mode="loss", losses=True)
        session.compute(hidden, labels, weight_version=first.weight_version)
        head.write_weights(np.zeros((V, H), np.float32))
        with pytest.raises(lossd.FailedPreconditionError, match="version"):
            session.compute(hidden, labels, weight_version=first.weight_version)


def interrupt(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The nth call of the next flush's sink is cut at its first instruction, as by a signal that is pending."""
    real, calls = _structs.RowSink, itertools.count(1)

    def make(called: Any) -> Any:
        def cut(*arguments: Any) -> Any:
            if next(calls) == nth:
                raise KeyboardInterrupt
            return called(*arguments)

        return real(cut)

    monkeypatch.setattr(_structs, "RowSink", make)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("commit", [True, False])
def test_a_signal_before_a_sink_leaves_no_hole(
    make_head: MakeHead, monkeypatch: pytest.MonkeyPatch, nth: int, commit: bool
) -> None:
    head, (hidden, labels) = make_head(3 << 16, H), batch()  # 12 MiB, in pieces of 2 and more
    taken: list[int] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda _told: None)
    sink = lambda first, rows, _bias: taken.append(first)  # noqa: E731
    with head.open_session() as session:
        session.compute(hidden, labels)
        head.flush(sink=sink)
        pieces = len(taken)
        assert pieces >= 3
        session.compute(hidden, labels)
        with monkeypatch.context() as during:
            interrupt(during, nth if nth < 3 else pieces)
            with pytest.raises(lossd.CancelledError, match="sink"):
                head.flush(sink=sink, commit=commit)
        assert len(head.marks()) == 1 and head.info().window_state == "open"
        assert head.flush(sink=sink).window_tokens == 4
        assert head.marks() == []


@pytest.mark.parametrize("name", ["progress", "on_frozen"])
def test_a_flush_whose_callback_raises_commits_nothing(make_head: MakeHead, name: str) -> None:
    head, (hidden, labels) = make_head(), batch()
    with head.open_session() as session:
        session.compute(hidden, labels)
        for out in (None, np.zeros((V, H), np.float32)):
            with pytest.raises(ZeroDivisionError):
                head.flush(out, **{name: lambda *_: 1 // 0})
            assert len(head.marks()) == 1 and head.info().window_state == "open"
        assert head.flush(**{name: lambda *_: None}).window_tokens == 4
        assert head.marks() == []


def test_a_step_that_is_repeated_names_the_same_marks(make_head: MakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a step is lost, and one of two sessions is over, which the server has forgotten since."""
    head, (hidden, labels) = make_head(optimizer=lossd.SGD()), batch()
    live = head.open_session()
    live.compute(hidden, labels)
    with head.open_session() as session:
        session.compute(hidden, labels)
    generation = head.info().generation
    real = type(_library.library()).call

    def lose(self: Any, name: str, *arguments: Any, **options: Any) -> None:
        real(self, name, *arguments, **options)
        if name == "lossd_head_apply_step":
            raise lossd.UnavailableError("lost")

    for _ in range(2):
        with monkeypatch.context() as during:
            during.setattr(type(_library.library()), "call", lose)
            with pytest.raises(lossd.UnavailableError):
                head.step(0.1, generation=generation)
    assert head.marks() == [live.marks()]  # as another call finds out
    result = head.step(0.1, generation=generation)
    assert (result.step, result.window_tokens, head.info().optimizer_steps) == (1, 8, 1)
    assert head.marks() == [] and head.step(0.1).window_tokens == 0  # and the next one is another step


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_is_a_gradient_that_is_not(make_head: MakeHead, scale: float) -> None:
    head = make_head(optimizer=lossd.SGD())
    before = head.read_weights()
    with head.open_session() as session:
        session.compute(*batch())
        with pytest.raises(FloatingPointError, match="nothing was stepped"):
            head.step(0.1, gradient_scale=scale)
        assert head.gradient_stats().window_tokens == 4
        result = head.step(0.1, gradient_scale=scale, skip_non_finite=True)
        assert result.skipped and result.window_tokens == 4 and result.generation == head.info().generation
        assert np.array_equal(head.read_weights(), before) and head.info().window_tokens == 0
        session.compute(*batch())
        assert head.step(0.1).window_tokens == 4


@pytest.fixture
def saved_with_a_closed_session(tmp_path: Path) -> Iterator[lossd.Client]:
    """A head "h" whose window holds what a session of this client added that is over, and a checkpoint of it."""
    with lossd.launch("cpu", checkpoint_dir=tmp_path / "saved") as server, server.client() as client:
        head = client.create_head("h", V, H, "float32", optimizer=lossd.SGD())
        head.write_weights(np.ones((V, H), np.float32))
        with head.open_session() as session:
            session.compute(*batch())
        head.save_checkpoint("a")
        yield client


def test_who_restores_a_head_still_names_what_the_checkpoint_has(saved_with_a_closed_session: lossd.Client) -> None:
    client = saved_with_a_closed_session
    client.restore_checkpoint("h", "a")
    head = client.head("h")
    with head.open_session() as session:
        session.compute(*batch())
        assert head.flush().window_tokens == 8
        assert head.flush().window_tokens == 0


def test_who_has_not_heard_of_a_restore_names_what_the_checkpoint_has(
    saved_with_a_closed_session: lossd.Client,
) -> None:
    client = saved_with_a_closed_session
    head = client.head("h")
    with lossd.connect(client.target) as other:
        other.restore_checkpoint("h", "a")
    assert head.gradient_stats().window_tokens == 4
    assert head.flush().window_tokens == 4


def test_who_has_not_heard_of_a_restore_ends_no_window_of_the_same_numbers(
    saved_with_a_closed_session: lossd.Client,
) -> None:
    """The session had come to them with other chunks, which the checkpoint "b" is not of."""
    client = saved_with_a_closed_session
    head = client.head("h")
    with lossd.connect(client.target) as other:
        given_up = other.head("h").open_session(client_key="k")
        other.head("h").save_checkpoint("a")
        given_up.compute(*batch())
        other.head("h").save_checkpoint("b")
        other.restore_checkpoint("h", "a")
        session = head.open_session(client_key="k")
        session.compute(*batch(seed=1))
        marks = head.marks()
        other.restore_checkpoint("h", "b")
    for call in (head.gradient_stats, head.discard, head.flush, functools.partial(head.step, 0.1)):
        with pytest.raises(lossd.WindowLostError, match="restored from a checkpoint"):
            call(marks=marks)
    assert head.info().generation == 1
    assert head.flush().window_tokens == 8  # it has heard by now


def test_who_restored_a_head_has_not_heard_of_the_next_restore(saved_with_a_closed_session: lossd.Client) -> None:
    """Nor does looking at the head tell it."""
    client = saved_with_a_closed_session
    head = client.head("h")
    with lossd.connect(client.target) as other:
        given_up = other.head("h").open_session(client_key="k")
        other.head("h").save_checkpoint("c")
        given_up.compute(*batch())
        other.head("h").save_checkpoint("b")
        client.restore_checkpoint("h", "c")
        session = head.open_session(client_key="k")
        session.compute(*batch(seed=1))
        other.restore_checkpoint("h", "b")
    client.head("h")
    with pytest.raises(lossd.WindowLostError, match="restored from a checkpoint"):
        head.flush()


def test_marks_say_where_they_are_true(make_head: MakeHead) -> None:
    head = make_head()
    with head.open_session() as session:
        session.compute(*batch())
        marks = json.loads(session.marks())
        assert marks["incarnation"] == head.client.status().incarnation
        assert (marks["restores"], marks["generation"]) == (0, 1)
        without = {key: value for key, value in marks.items() if key != "incarnation"}
        for wrong in (without, {**marks, "incarnation": 1}, {**marks, "restores": -1}):
            with pytest.raises(lossd.InvalidArgumentError, match=r"marks\[0\] is not what"):
                head.flush(marks=[json.dumps(wrong)])
        with pytest.raises(lossd.WindowLostError):
            head.flush(marks=[json.dumps({**marks, "incarnation": "another"})])
        assert head.flush(marks=[json.dumps(marks)]).window_tokens == 4


def test_a_session_in_the_place_of_a_lost_one_has_added_what_it_says() -> None:
    """As after the loss of a replica that had nothing of the window: the session goes on as another one, which counts
    from 1 again."""
    told = [json.dumps({"session_id": "a", "lanes": [{"lane": 0, "accepted": 20}]})]
    contributor = Contributor("trainer", lambda: told[-1])
    assert contributor.contributed()
    contributor.begin_window(told[-1])
    assert not contributor.contributed()
    told.append(json.dumps({"session_id": "b", "lanes": [{"lane": 0, "accepted": 3}]}))
    assert contributor.contributed()
    contributor.begin_window(told[-1])
    assert not contributor.contributed()
