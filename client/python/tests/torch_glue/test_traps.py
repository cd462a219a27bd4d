"""What used to train wrongly without a word, and now works, warns or raises."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from glue_support import HIDDEN, VOCAB, batch, weights_of
from servers import Restartable

import lossd
from lossd.torch import (
    FrozenCopyWarning,
    RemoteOptimizer,
    StaleWeightsWarning,
    UnsteppedHeadWarning,
    UntiedHeadWarning,
    linear_cross_entropy,
)
from lossd.torch.head import RemoteHead

MakeRemote = Callable[..., RemoteHead]


@pytest.fixture
def name(client: lossd.Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a head that the test makes."""
    name = request.node.name[:100].replace("[", "-").rstrip("]")
    yield name
    if name in {info.config.name for info in client.heads()}:
        client.delete_head(name, discard_gradient=True)


# Options of sessions, which are opened with the first loss


def test_an_option_that_no_session_has_is_refused_before_a_head_is_made(client: lossd.Client) -> None:
    linear = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    with pytest.raises(TypeError, match=r"'held_hiden_bytes' .*did you mean held_hidden_bytes\?.*client_key"):
        RemoteHead.from_linear(client, linear, "no-such-option", session_options={"held_hiden_bytes": 1 << 20})
    assert "no-such-option" not in [info.config.name for info in client.heads()]
    head = client.create_head("options", VOCAB, HIDDEN)
    try:
        with pytest.raises(TypeError, match="'rows' is no option of a session: want one of client_key, lanes"):
            RemoteHead(head, rows=3)
    finally:
        client.delete_head("options")


# Heads that nobody steps


def test_a_head_in_no_optimizer_warns_at_the_second_step(make_remote: MakeRemote) -> None:
    head, trunk = make_remote(optimizer=lossd.AdamW()), torch.nn.Linear(HIDDEN, HIDDEN)
    optimizer = torch.optim.AdamW(trunk.parameters(), lr=0.1)

    def step(seed: int) -> None:
        hidden, labels = batch(seed)
        linear_cross_entropy(trunk(hidden), labels, head).backward()
        optimizer.step()

    step(0)
    with pytest.warns(UnsteppedHeadWarning, match=rf"head '{head.name}' was left out.*model.lm_head = head"):
        step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(2)  # it is said once


def test_a_head_that_is_stepped_beside_the_optimizer_does_not_warn(make_remote: MakeRemote) -> None:
    head, trunk = make_remote(optimizer=lossd.AdamW()), torch.nn.Linear(HIDDEN, HIDDEN)
    optimizer = torch.optim.AdamW(trunk.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            hidden, labels = batch(seed)
            for _ in range(2):  # accumulated
                linear_cross_entropy(trunk(hidden), labels, head).backward()
            optimizer.step()
            head.step(0.1)
    assert head.head.info().optimizer_steps == 4


def test_a_step_of_another_process_counts_as_one(make_remote: MakeRemote, server: lossd.Server) -> None:
    head, trunk = make_remote(optimizer=lossd.AdamW()), torch.nn.Linear(HIDDEN, HIDDEN)
    optimizer = torch.optim.AdamW(trunk.parameters(), lr=0.1)
    with server.client() as other, warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            hidden, labels = batch(seed)
            linear_cross_entropy(trunk(hidden), labels, head).backward()
            optimizer.step()
            other.head(head.name).step(0.1, marks=head.marks())
    assert head.head.info().optimizer_steps == 3


def test_a_gradient_that_is_dropped_after_each_step_warns(make_remote: MakeRemote) -> None:
    """As where the optimizer was made before the head took the Linear's place."""
    head = make_remote(optimizer=lossd.SGD())
    model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(HIDDEN, HIDDEN), "lm_head": head})
    optimizer = torch.optim.SGD(model["trunk"].parameters(), lr=0.1)
    hidden, labels = batch()
    model["lm_head"](model["trunk"](hidden), labels).backward()
    optimizer.step()
    with pytest.warns(UnsteppedHeadWarning, match="its gradient is dropped unused"):
        model.zero_grad()


def test_a_head_that_was_stepped_already_is_left_alone(make_remote: MakeRemote) -> None:
    head, trunk = make_remote(optimizer=lossd.AdamW()), torch.nn.Linear(HIDDEN, HIDDEN)
    first = torch.optim.AdamW([*trunk.parameters(), *head.parameters()], lr=0.1)
    second = RemoteOptimizer(head, lr=0.1)
    linear_cross_entropy(trunk(batch()[0]), batch()[1], head).backward()
    for optimizer in (first, second, first):
        optimizer.step()
    assert head.head.info().optimizer_steps == 1


def test_decay_by_dimensions_reaches_the_head(make_remote: MakeRemote) -> None:
    """The split that many trainers make: what has two dimensions is decayed."""
    head = make_remote(optimizer=lossd.AdamW())
    local = torch.nn.Parameter(weights_of(head))
    for parameters in (head.parameters(), [local]):
        parameters = list(parameters)
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.1)
        hidden, labels = batch()
        if parameters[0] is local:
            torch.nn.functional.cross_entropy(hidden @ local.T, labels).backward()
        else:
            head(hidden, labels).backward()
        optimizer.step()
    torch.testing.assert_close(weights_of(head), local.detach(), rtol=1e-5, atol=1e-6)


def test_more_behind_a_scaled_gradient_is_refused(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    head(*batch()).backward()
    torch.nn.utils.clip_grad_norm_(head.parameters(), 0.01)
    with pytest.raises(RuntimeError, match="was scaled.*behind the last backward.*zero_grad"):
        head(*batch()).backward()
    head.zero_grad()
    head(*batch()).backward()


def test_what_waits_behind_a_closed_session_is_still_stepped(make_remote: MakeRemote) -> None:
    head = make_remote(optimizer=lossd.SGD())
    head(*batch()).backward()
    head.close()
    with torch.no_grad():
        head(*batch())
    assert head.dirty
    torch.optim.SGD(head.parameters(), lr=0.1).step()
    assert head.head.info().optimizer_steps == 1


# Weights that stay where they were


def test_a_linear_that_stays_is_said_to_be_stale(client: lossd.Client, name: str) -> None:
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(HIDDEN, VOCAB)})
    head = RemoteHead.from_linear(client, model["lm_head"], name, optimizer=lossd.SGD())
    linear_cross_entropy(*batch(), head).backward()
    with pytest.warns(StaleWeightsWarning, match=f"head '{name}' was stepped.*model.lm_head = head"):
        head.step(0.1)
    linear_cross_entropy(*batch(), head).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.step(0.1)


def test_a_linear_that_was_replaced_is_not(client: lossd.Client, name: str) -> None:
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(HIDDEN, VOCAB)})
    model["lm_head"] = RemoteHead.from_linear(client, model["lm_head"], name, optimizer=lossd.SGD(lr=0.1))
    model["lm_head"](*batch()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["lm_head"].step()
    assert model["lm_head"].head.info().optimizer_steps == 1


def test_a_linear_that_only_a_variable_holds_is_not_stale(client: lossd.Client, name: str) -> None:
    linear = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head = RemoteHead.from_linear(client, linear, name, optimizer=lossd.SGD())
    head(*batch()).backward()
    seen = [linear]  # as fully_shard keeps modules, outside of any other
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.step(0.1)
    assert head.head.info().optimizer_steps == 1
    del seen


def test_an_embedding_that_was_tied_to_the_head_goes_apart_with_a_word(client: lossd.Client, name: str) -> None:
    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(VOCAB, HIDDEN), "lm_head": torch.nn.Linear(HIDDEN, VOCAB, bias=False)}
    )
    model["lm_head"].weight = model["embedding"].weight
    model["lm_head"] = RemoteHead.from_linear(client, model["lm_head"], name, optimizer=lossd.SGD())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = batch()[1]
    model["lm_head"](model["embedding"](labels), labels).backward()
    with pytest.warns(UntiedHeadWarning, match=f"'{name}'.*tied.*LocalWeight"):
        optimizer.step()
    model["lm_head"](model["embedding"](labels), labels).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_what_a_head_is_not_made_of_is_named(client: lossd.Client) -> None:
    linear = torch.nn.Linear(HIDDEN, VOCAB)
    for given, match in [
        ((linear, client), "client is a Linear; want a lossd.Client"),
        ((client, client), "linear is a Client; want the torch.nn.Linear"),
        ((client.target, linear), r"client is a str; .*lossd.connect\(address\)"),
        ((client, linear.to("meta")), "meta device.*load its weights first"),
    ]:
        with pytest.raises(TypeError, match=match):
            RemoteHead.from_linear(*given, "not made")
    assert "not made" not in {info.config.name for info in client.heads()}


def test_reopening_a_head_says_nothing_of_steps(make_remote: MakeRemote) -> None:
    model = torch.nn.ModuleDict(
        {"trunk": torch.nn.Linear(HIDDEN, HIDDEN), "lm_head": make_remote(optimizer=lossd.SGD())}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden, labels = batch()
    model["lm_head"](model["trunk"](hidden), labels).backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["lm_head"].reopen()
    assert model["lm_head"].head.info().window_tokens == 0


# Copies


def test_a_copied_model_has_a_frozen_copy_of_the_head(make_remote: MakeRemote, client: lossd.Client) -> None:
    model = torch.nn.ModuleDict(
        {"trunk": torch.nn.Linear(HIDDEN, HIDDEN), "lm_head": make_remote(optimizer=lossd.SGD())}
    )
    head = model["lm_head"]
    hidden, labels = batch()
    with pytest.warns(FrozenCopyWarning, match=f"frozen head '{head.name}-copy-1'.*EMA"):
        reference = copy.deepcopy(model)
    copied = reference["lm_head"]
    before = weights_of(head)
    first = copied(hidden, labels).item()
    assert copied.name == f"{head.name}-copy-1" and copied.frozen and not copied.proxy.requires_grad
    assert list(copied.parameters()) == [copied.proxy]
    head(hidden, labels).backward()
    head.step(1.0)
    assert torch.equal(weights_of(copied), before) and not torch.equal(weights_of(head), before)
    assert copied(hidden, labels).item() == first > head(hidden, labels).item()
    with pytest.warns(FrozenCopyWarning):
        again = copy.deepcopy(model)["lm_head"]
    assert again.name == f"{head.name}-copy-2"
    del again, copied, reference
    gc.collect()
    assert not [info for info in client.heads() if "-copy-" in info.config.name]


def test_a_process_with_a_copy_ends_though_the_server_has_gone(tmp_path: Path) -> None:
    server = Restartable(tmp_path)
    program = """
import copy, sys
import torch
import lossd
from lossd.torch import RemoteHead

client = lossd.connect(sys.argv[1], reconnect_timeout=100_000)
copied = copy.deepcopy(RemoteHead.from_linear(client, torch.nn.Linear(8, 16, bias=False), "head"))
print("copied", flush=True)
input()
"""
    command = [sys.executable, "-W", "ignore", "-c", program, server.target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copied\n"
        server.kill()
        process.communicate("\n", timeout=300)  # it would wait for a day
    assert process.returncode == 0


def test_a_snapshot_has_everything_that_logits_depend_on(make_remote: MakeRemote, client: lossd.Client) -> None:
    head = make_remote(vocab=5000, bias=True, softcap=5.0, logit_scale=0.5, dtype="bfloat16")
    head.write_weights(torch.randn(5000, HIDDEN), torch.randn(5000))
    copied = head.snapshot(f"{head.name}-before")
    hidden, _ = batch()
    assert torch.equal(copied.logits(hidden), head.logits(hidden))
    assert torch.equal(copied.state_dict()["bias"], head.state_dict()["bias"])
    with pytest.raises(lossd.AlreadyExistsError):
        head.snapshot(copied.name)
    client.delete_head(copied.name)


# Names that are in use


@pytest.fixture
def used(client: lossd.Client, name: str) -> RemoteHead:
    """A head after one step, with something in its window."""
    head = RemoteHead.create(
        client, name, VOCAB, HIDDEN, dtype=torch.float32, weights=torch.randn(VOCAB, HIDDEN), optimizer=lossd.AdamW()
    )
    for _ in range(2):
        linear_cross_entropy(*batch(), head).backward()
        if head.head.info().optimizer_steps == 0:
            head.step(0.1)
    return head


def take(client: lossd.Client, name: str, **options: Any) -> RemoteHead:
    linear = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    return RemoteHead.from_linear(client, linear, name, optimizer=lossd.AdamW(), **options)


def test_a_name_in_use_is_not_taken_over(client: lossd.Client, name: str, used: RemoteHead) -> None:
    before = used.head.info()
    with pytest.raises(
        lossd.AlreadyExistsError, match=f"head '{name}'.*1 steps.*8 tokens.*exist_ok=True.*reset=True.*group="
    ):
        take(client, name)
    assert used.head.info() == before


def test_exist_ok_goes_on_with_what_is_there(client: lossd.Client, name: str, used: RemoteHead) -> None:
    before = used.head.info()
    head = take(client, name, exist_ok=True)
    assert head.head.info() == before and torch.equal(weights_of(head), weights_of(used))
    with pytest.raises(lossd.AlreadyExistsError):  # of another configuration
        RemoteHead.create(client, name, VOCAB + 1, HIDDEN, exist_ok=True)


def test_reset_begins_anew(client: lossd.Client, name: str, used: RemoteHead) -> None:
    linear = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head = RemoteHead.from_linear(client, linear, name, optimizer=lossd.AdamW(), reset=True)
    info = head.head.info()
    assert (info.optimizer_steps, info.window_tokens) == (0, 0) and torch.equal(weights_of(head), linear.weight)


def test_a_head_that_was_never_used_is_in_nobodys_way(client: lossd.Client, name: str) -> None:
    """As a process leaves it that ends between making a head and writing its weights."""
    client.create_head(name, VOCAB, HIDDEN, "float32", optimizer=lossd.AdamW())
    assert take(client, name).head.info().weight_version == 1


# Steps that are tried again


def test_a_loss_that_only_looks_does_not_make_a_step_count_twice(
    make_remote: MakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads, of which the second one's step fails: the first has taken the step that is tried again."""
    first, second = (make_remote(optimizer=lossd.AdamW()) for _ in range(2))
    optimizer = RemoteOptimizer([first, second], lr=0.1)
    for head in (first, second):
        linear_cross_entropy(*batch(), head).backward()

    def gone(*_: Any, **__: Any) -> Any:
        raise lossd.UnavailableError("gone")

    with monkeypatch.context() as away:
        away.setattr(second.head, "step", gone)
        with pytest.raises(lossd.UnavailableError):
            optimizer.step()
    with torch.no_grad():
        linear_cross_entropy(*batch(1), first)
    assert not first.dirty
    optimizer.step()
    assert [head.head.info().optimizer_steps for head in (first, second)] == [1, 1]


# Servers that were there before


def test_a_launched_server_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    weights = torch.randn(VOCAB, HIDDEN)
    with lossd.launch("cpu", checkpoint_dir=tmp_path) as server, server.client() as client:
        RemoteHead.create(client, "kept", VOCAB, HIDDEN, dtype=torch.float32, weights=weights)
    with lossd.launch("cpu", checkpoint_dir=tmp_path) as server, server.client() as client:
        assert torch.equal(weights_of(RemoteHead(client.head("kept"))), weights)
    with pytest.raises(lossd.LaunchError, match="--restore"):
        lossd.launch("cpu", checkpoint_dir=tmp_path, restore=False)
