"""state_dict and load_state_dict of models whose lm_head lives at a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from glue_support import weights_of

import lossd
from lossd.torch.head import RemoteHead

MakeRemote = Callable[..., RemoteHead]


class Model(torch.nn.Module):
    def __init__(self, head: torch.nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(6, 6)
        self.lm_head = head


def remote_model(head: RemoteHead) -> Model:
    return Model(head)


@pytest.mark.parametrize("bias", [False, True])
def test_state_travels_between_local_and_remote(make_remote: MakeRemote, bias: bool, tmp_path: Path) -> None:
    local = Model(torch.nn.Linear(6, 11, bias=bias))
    remote = remote_model(make_remote(bias=bias))
    assert list(remote.state_dict()) == list(local.state_dict())
    torch.save(local.state_dict(), tmp_path / "model.pt")
    assert (
        str(remote.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)) == "<All keys matched successfully>"
    )
    back = Model(torch.nn.Linear(6, 11, bias=bias))
    back.load_state_dict(remote.state_dict())
    for name, value in local.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


def test_prefixes_of_nested_modules(make_remote: MakeRemote) -> None:
    head = make_remote()
    outer = torch.nn.ModuleDict({"model": remote_model(head)})
    state = outer.state_dict()
    assert torch.equal(state["model.lm_head.weight"], weights_of(head))
    state["model.lm_head.weight"] = torch.zeros(11, 6)
    outer.load_state_dict(state)
    assert torch.equal(weights_of(head), torch.zeros(11, 6))
    assert state.keys() == outer.state_dict().keys()  # the caller's dict is as it was


def test_what_does_not_fit_is_reported_as_torch_does(make_remote: MakeRemote) -> None:
    head = make_remote()
    model = remote_model(head)
    before, version = weights_of(head), head.head.info().weight_version
    good = model.state_dict()
    for spoil, message in (
        (
            lambda s: s.update({"lm_head.weight": torch.zeros(11, 5)}),
            r"size mismatch for lm_head.weight: .*\(11, 5\).*\(11, 6\)",
        ),
        (lambda s: s.pop("lm_head.weight"), 'Missing key.*"lm_head.weight"'),
        (lambda s: s.update({"lm_head.bias": torch.zeros(11)}), 'Unexpected key.*"lm_head.bias"'),
        (lambda s: s.update({"lm_head.weight": torch.zeros(11, 6, dtype=torch.int8)}), "torch.int8"),
        (lambda s: s.update({"lm_head.weight": torch.zeros(11, 6, device="meta")}), "meta"),
    ):
        state = dict(good)
        spoil(state)
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state)
        assert torch.equal(weights_of(head), before)
    assert head.head.info().weight_version <= version + 1  # the state with one key too many was fine otherwise


def test_not_strict_leaves_the_weights_alone(make_remote: MakeRemote) -> None:
    head = make_remote()
    model = remote_model(head)
    state = model.state_dict()
    del state["lm_head.weight"]
    version = head.head.info().weight_version
    assert model.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    assert head.head.info().weight_version == version


def test_a_weight_without_its_bias_is_refused(make_remote: MakeRemote) -> None:
    model = remote_model(make_remote(bias=True))
    state = model.state_dict()
    del state["lm_head.bias"]
    with pytest.raises(RuntimeError, match="one version"):
        model.load_state_dict(state, strict=False)


def test_the_heads_own_state(make_remote: MakeRemote) -> None:
    head, other = make_remote(bias=True), make_remote(bias=True, weights=None)
    state = head.state_dict()
    assert set(state) == {"weight", "bias"}
    other.load_state_dict(state)
    assert other.weight_version == other.head.info().weight_version
    assert torch.equal(weights_of(other), weights_of(head))
    with pytest.raises(RuntimeError, match="bias"):
        other.load_state_dict({"weight": state["weight"]})
    with pytest.raises(ValueError, match=r"weights of head .* is \[6, 11\], and must be \[11, 6\]"):
        other.write_weights(state["weight"].T, state["bias"])
    with pytest.raises(ValueError, match="has a bias, and bias is None: give it"):
        other.write_weights(state["weight"])


def test_create_and_from_linear(client: lossd.Client) -> None:
    linear = torch.nn.Linear(6, 11, dtype=torch.bfloat16)
    head = RemoteHead.from_linear(client, linear, "from-linear", optimizer=lossd.SGD(), softcap=30.0)
    assert head.dtype == torch.bfloat16 and head.has_bias and head.head.config.softcap == 30.0
    weight, bias = head.read_weights()
    assert torch.equal(weight, linear.weight) and bias is not None and torch.equal(bias, linear.bias.float())
    client.delete_head("from-linear")


def test_a_state_that_says_nothing_new_leaves_master_weights(make_remote: MakeRemote) -> None:
    head = make_remote(dtype="bfloat16", master_weights=True, bias=True, optimizer=lossd.SGD(lr=1e-3))
    model = remote_model(head)
    model.lm_head(torch.ones(2, 6), torch.tensor([1, 2])).backward()
    head.step()
    before, version = head.read_weights(dtype=torch.float32)[0], head.head.info().weight_version
    state = model.state_dict()
    assert not before.equal(state["lm_head.weight"].float())
    model.load_state_dict(state)
    assert head.read_weights(dtype=torch.float32)[0].equal(before)
    assert head.head.info().weight_version == version
    state["lm_head.bias"] += 1.0
    model.load_state_dict(state)
    assert head.read_weights(dtype=torch.float32)[0].equal(state["lm_head.weight"].float())
