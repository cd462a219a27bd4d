"""GPTModels with their output layer at a server against the same models with Megatron's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import nightly
from gpt_models import (
    EXACT,
    HIDDEN,
    VOCABULARY,
    Layout,
    assert_same,
    batch,
    client_of,
    distance,
    gathered_rows,
    gradients,
    model_of,
    objective,
    parallel,
    twins,
)
from ranks import Ranks

import lossd

LAYOUTS = [
    Layout(tp=2, sequence=True, mtp=2),
    *nightly(
        Layout(),
        Layout(tp=2),
        Layout(tp=2, length=7),
        Layout(tp=2, sequence=True),
        Layout(mtp=2),
        Layout(tp=2, mtp=2),
        Layout(tp=2, mtp=1, length=7),
    ),
]


def replaced(model: Any, target: str, name: str, **options: Any) -> Any:
    from lossd.megatron import replace_output_layer

    client = client_of(target)
    options = options if options.get("own_weight") else {"optimizer": lossd.SGD(), **options}
    if "exist_ok" not in options:
        options["reset"] = True  # of a test that failed
    return replace_output_layer(model, client, name, **options)


def finish(layer: Any) -> None:
    """The head goes when both ranks are done with it."""
    dist.barrier()
    layer.head.close()
    dist.barrier()
    if dist.get_rank() == 0:
        layer.head.head.client.delete_head(layer.head.name, discard_gradient=True)
    dist.barrier()


def losses_and_gradients(rank: int, group: dist.ProcessGroup, target: str, layout: Layout, per_token: bool) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    with parallel(layout):
        local, remote = twins(layout, calculate_per_token_loss=per_token)
        layer = replaced(remote, target, "gpt")
        given = batch(layout)
        MTPLossAutoScaler.set_loss_scale(torch.tensor(0.5))
        logged = []
        for model in (local, remote):
            MTPLossLoggingHelper.tracker.clear()
            losses = model(**given)
            assert losses.dtype == torch.float32 and losses.shape == given["labels"].shape
            logged.append((losses, MTPLossLoggingHelper.tracker.get("values")))
            objective(losses, given["loss_mask"]).backward()
        (wanted, wanted_log), (found, found_log) = logged
        assert distance(found, wanted) <= EXACT
        if layout.mtp:
            assert distance(found_log, wanted_log) <= EXACT
        own = gradients(local)
        dw = gathered_rows(own.pop("output_layer.weight"), layout)
        assert_same(gradients(remote), own)
        result = layer.head.flush()
        if rank == 0:
            assert distance(result.gradient, dw) <= EXACT
        finish(layer)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_gradients(ranks: Ranks, server: lossd.Server, layout: Layout) -> None:
    ranks.run(losses_and_gradients, server.target, layout, False)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [Layout(mtp=2), Layout(tp=2, sequence=True, mtp=2)])
def test_depths_whose_losses_are_not_divided_here(ranks: Ranks, server: lossd.Server, layout: Layout) -> None:
    ranks.run(losses_and_gradients, server.target, layout, True)


def counted(rank: int, group: dist.ProcessGroup, target: str, layout: Layout) -> list[tuple[str, int]]:
    with parallel(layout):
        model = model_of(layout)
        layer = replaced(model, target, "gpt")
        passes = []
        compute = lossd.Session.compute

        def recorded(self: Any, hidden: Any, labels: Any, **options: Any) -> Any:
            passes.append((options["mode"], int((labels != -100).sum())))
            return compute(self, hidden, labels, **options)

        lossd.Session.compute = recorded  # type: ignore[method-assign]
        try:
            given = batch(layout)
            objective(model(**given), given["loss_mask"]).backward()
        finally:
            lossd.Session.compute = compute  # type: ignore[method-assign]
        finish(layer)
        return passes


@pytest.mark.nightly
def test_all_depths_are_one_batch_and_each_token_is_sent_by_one_rank(ranks: Ranks, server: lossd.Server) -> None:
    for sequence in (False, True):
        passes = ranks.run(counted, server.target, Layout(tp=2, sequence=sequence))
        assert [[mode for mode, _ in one] for one in passes] == [["loss", "gradients"]] * 2
        assert sum(tokens for one in passes for mode, tokens in one if mode == "loss") == 16
        passes = ranks.run(counted, server.target, Layout(tp=2, sequence=sequence, mtp=2))
        assert [[mode for mode, _ in one] for one in passes] == [["loss", "gradients"]] * 2


def masked(rank: int, group: dist.ProcessGroup, target: str, layout: Layout) -> None:
    with parallel(layout):
        local, remote = twins(layout)
        layer = replaced(remote, target, "gpt", skip_masked=True)
        given = batch(layout)
        for model in (local, remote):
            losses = model(**given)
            objective(losses, given["loss_mask"]).backward()
        assert not losses[given["loss_mask"] == 0].any()
        own = gradients(local)
        dw = gathered_rows(own.pop("output_layer.weight"), layout)
        assert_same(gradients(remote), own)
        result = layer.head.flush()
        if rank == 0:
            assert distance(result.gradient, dw) <= EXACT
        finish(layer)


@pytest.mark.nightly
def test_masked_tokens_may_stay_here(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(masked, server.target, Layout(tp=2))


def logits(rank: int, group: dist.ProcessGroup, target: str, layout: Layout) -> None:
    with parallel(layout):
        local, remote = twins(layout)
        layer = replaced(remote, target, "gpt")
        given = batch(layout)
        del given["labels"], given["loss_mask"]
        with torch.no_grad():
            for gather in (False, True):
                wanted, found = (model(**given, runtime_gather_output=gather) for model in (local, remote))
                assert distance(found, wanted) <= EXACT
        for training in (True, False):  # eval() alone wants no other gradient
            remote.train(training)
            with pytest.raises(RuntimeError, match="labels=.*no_grad"):
                remote(**given)
        finish(layer)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sequence=True)])
def test_logits_without_labels(ranks: Ranks, server: lossd.Server, layout: Layout) -> None:
    ranks.run(logits, server.target, layout)


def refused(rank: int, group: dist.ProcessGroup, target: str) -> list[str]:
    from lossd.megatron import replace_output_layer

    layout = Layout()
    said = []
    with parallel(layout):
        client = client_of(target)
        tied, untied = model_of(layout, tied=True), model_of(layout)
        for model, options in [
            (tied, {"optimizer": lossd.SGD()}),
            (untied, {}),
            (untied, {"optimizer": lossd.SGD(), "own_weight": True}),
            (untied, {"optimizer": lossd.SGD(), "delay_wgrad": True}),
            (torch.nn.Sequential(untied), {"optimizer": lossd.SGD()}),
        ]:
            with pytest.raises((TypeError, ValueError)) as raised:
                replace_output_layer(model, client, "refused", **options)
            said.append(str(raised.value))
        layer = replaced(untied, target, "gpt")
        with pytest.raises(ValueError) as raised:
            replaced(untied, target, "gpt")
        said.append(str(raised.value))
        assert client.status() and "refused" not in [one.config.name for one in client.heads()]
        finish(layer)
    return said


def test_what_cannot_be_replaced_says_what_to_do(ranks: Ranks, server: lossd.Server) -> None:
    for said in ranks.run(refused, server.target):
        for message, words in zip(
            said,
            ["own_weight=True", "optimizer", "one of them", "delay_wgrad", "model_provider", "already"],
            strict=True,
        ):
            assert words in message


def states(rank: int, group: dist.ProcessGroup, target: str, layout: Layout, folder: str, own_weight: bool) -> None:
    from megatron.core import dist_checkpointing

    with parallel(layout):
        local, remote = twins(layout)
        layer = replaced(remote, target, "gpt", own_weight=own_weight)
        assert remote.state_dict().keys() == local.state_dict().keys()
        rows = local.output_layer.weight.detach().clone()
        assert torch.equal(remote.state_dict()["output_layer.weight"], rows)
        # A plain state dict, of a local model.
        other = dict(local.state_dict())
        other["output_layer.weight"] = rows + 1
        remote.load_state_dict(other)
        assert torch.equal(remote.state_dict()["output_layer.weight"], rows + 1)
        # Megatron's own checkpoints: there, and back into both kinds of model.
        dist_checkpointing.save(remote.sharded_state_dict(), folder)
        remote.load_state_dict(other | {"output_layer.weight": rows})
        for model in (local, remote):
            state = dist_checkpointing.load(model.sharded_state_dict(), folder)
            model.load_state_dict(state)
            assert torch.equal(model.state_dict()["output_layer.weight"], rows + 1)
        given = batch(layout)
        with torch.no_grad():
            assert distance(remote(**given), local(**given)) <= EXACT
        finish(layer)


@pytest.mark.nightly
@pytest.mark.parametrize("own_weight", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)])
def test_checkpoints(ranks: Ranks, server: lossd.Server, layout: Layout, own_weight: bool, tmp_path: Any) -> None:
    ranks.run(states, server.target, layout, str(tmp_path), own_weight)


def kept(rank: int, group: dist.ProcessGroup, target: str) -> None:
    layout = Layout(tp=2)
    with parallel(layout):
        model, again = twins(layout)
        layer = replaced(model, target, "gpt")
        layer.write_rows(torch.full((VOCABULARY // 2, HIDDEN), float(rank)))
        with pytest.raises(lossd.AlreadyExistsError, match="exist_ok"):
            replaced(again, target, "gpt", exist_ok=False)
        second = replaced(again, target, "gpt", exist_ok=True)
        assert bool((second.read_rows() == rank).all())
        second.head.close()
        finish(layer)


@pytest.mark.nightly
def test_a_head_that_goes_on_keeps_its_weights(ranks: Ranks, server: lossd.Server) -> None:
    ranks.run(kept, server.target)
