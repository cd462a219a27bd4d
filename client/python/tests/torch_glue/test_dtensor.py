"""Hidden states that are DTensors: the loss of all ranks' tokens, each counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from glue_support import HIDDEN, VOCAB, Ranks, weights_of

import lossd
from lossd.torch import RemoteHead, linear_cross_entropy

SHAPE = (3, 5)
PLACED = ["shard 0", "shard 1", "replicate", "shard 0, replicate", "replicate, shard 0", "shard 1, shard 1"]


def placements(text: str) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if part == "replicate" else Shard(int(part[6:])) for part in text.split(", ")]


def mesh_of(group: dist.ProcessGroup, dims: int) -> Any:
    ranks = torch.arange(dist.get_world_size(group))
    if dims == 1:
        return dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    return dist.device_mesh.DeviceMesh("cpu", ranks.view(-1, 1) if dims == 2 else ranks.view(1, -1))


def whole(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*SHAPE, HIDDEN, generator=generator)
    labels = torch.randint(VOCAB, SHAPE, generator=generator)
    labels[0, :3] = -100  # so that ranks have different counts
    return hidden, labels, torch.rand(SHAPE, generator=generator)


def placed_loss(
    rank: int, group: dist.ProcessGroup, server: str, name: str, placed: str, options: dict[str, Any], kind: str
) -> Any:
    from torch.distributed.tensor import DTensor, distribute_tensor

    where = placements(placed)
    mesh = mesh_of(group, len(where))
    head = RemoteHead(lossd.connect(server).head(name), group=group)
    hidden, labels, weights = (distribute_tensor(one, mesh, where) for one in whole())
    hidden.requires_grad_()
    if kind == "plain labels":
        labels, weights = labels.to_local(), weights.to_local()
    call = linear_cross_entropy
    if kind == "compiled":
        torch._dynamo.reset()
        call = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    outputs = call(hidden, labels, head, token_weights=weights, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(isinstance(one, DTensor) for one in outputs)
    sum(one.sum() * (number + 1) for number, one in enumerate(outputs)).backward()
    assert hidden.grad.placements == hidden.placements
    flushed = head.flush()
    head.close()
    return [one.full_tensor().detach() for one in outputs], hidden.grad.full_tensor(), flushed.gradient


def reference(weight: torch.Tensor, options: dict[str, Any]) -> Any:
    hidden, labels, weights = whole()
    hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
    logits = F.linear(hidden, weight)
    if options.get("shift"):
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(SHAPE) * weights
    valid = labels != -100
    lse = logits.logsumexp(-1).masked_fill(~valid, 0.0)
    z_losses = options.get("lse_square_scale", 0.0) * lse.square() * weights
    reduction = options.get("reduction", "mean")
    divided = {"mean": valid.sum(), "sum": 1.0}.get(reduction)
    reduce = (lambda one: one) if divided is None else lambda one: one.sum() / divided
    outputs = [reduce(losses + z_losses)]
    outputs += [lse] if options.get("return_lse") else []
    outputs += [reduce(z_losses)] if options.get("return_z_loss") else []
    sum(one.sum() * (number + 1) for number, one in enumerate(outputs)).backward()
    return [one.detach() for one in outputs], hidden.grad, weight.grad


def check(
    ranks: Ranks,
    server: lossd.Server,
    head: RemoteHead,
    placed: str,
    options: dict[str, Any],
    kind: str = "DTensors",
) -> None:
    count = 3 if ", " in placed else 2
    answers = ranks.run(placed_loss, server.target, head.name, placed, options, kind, count=count)
    outputs, dx, dw = reference(weights_of(head), options)
    for found, found_dx, _ in answers:
        torch.testing.assert_close(found, outputs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found_dx, dx, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(answers[0][2], dw, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placed", PLACED)
def test_losses_are_those_of_all_tokens(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], placed: str
) -> None:
    check(ranks, server, make_remote(), placed, {})
    check(ranks, server, make_remote(), placed, {"reduction": "none", "return_lse": True})


@pytest.mark.parametrize(
    "options",
    [
        {"grad_scale": 1.0},
        {"reduction": "sum", "shift": True},
        {"lse_square_scale": 0.01, "return_lse": True, "return_z_loss": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("placed", ["shard 1", "replicate"])
def test_options(
    ranks: Ranks,
    server: lossd.Server,
    make_remote: Callable[..., RemoteHead],
    placed: str,
    options: dict[str, Any],
) -> None:
    check(ranks, server, make_remote(), placed, options)


@pytest.mark.parametrize("placed", ["shard 0", "replicate"])
def test_labels_may_be_plain_tensors_of_the_ranks_own_tokens(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], placed: str
) -> None:
    check(ranks, server, make_remote(), placed, {}, "plain labels")


@pytest.mark.parametrize("placed", ["shard 0", "replicate"])
def test_in_a_graph_of_torch_compile(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead], placed: str
) -> None:
    check(ranks, server, make_remote(), placed, {"grad_scale": 1.0}, "compiled")


def refused(rank: int, group: dist.ProcessGroup, server: str, name: str, weighted: str) -> list[str]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(group, 1)
    client = lossd.connect(server)
    head = RemoteHead(client.head(name), group=group)
    hidden, labels, _ = whole()
    rows = [distribute_tensor(one, mesh, [Shard(0)]) for one in (hidden, labels)]
    calls: list[Any] = [
        (distribute_tensor(hidden, mesh, [Shard(2)]), labels, head),
        (DTensor.from_local(hidden, mesh, [Partial()]), labels, head),
        (distribute_tensor(hidden, mesh, [Shard(0)]), labels, head),
        (hidden, distribute_tensor(labels, mesh, [Replicate()]), head),
        (distribute_tensor(hidden, mesh, [Shard(1)]), distribute_tensor(labels, mesh, [Shard(1)]).to_local(), head, 1),
        (*rows, RemoteHead(head.head, group=group, average=True)),
        (*rows, RemoteHead(client.head(weighted))),
    ]
    messages = []
    for input, target, to, *shift in calls:
        try:
            linear_cross_entropy(input, target, to, shift=bool(shift))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_is_refused_with_the_remedy(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    weighted = make_remote(class_weights=[1.0] * VOCAB)
    for messages in ranks.run(refused, server.target, make_remote().name, weighted.name):
        wanted = [
            "redistribute it first",
            "redistribute it first",
            r"this rank's part, [",
            "give its to_local() or full_tensor()",
            "Give target as a DTensor",
            "average=1",
            "`normalizer`",
        ]
        assert len(messages) == len(wanted)
        for message, part in zip(messages, wanted, strict=True):
            assert part in message


def averaged(rank: int, group: dist.ProcessGroup, server: str, name: str) -> Any:
    """Two batches of 2, on two ranks each, as 2 of 4 ranks would have them: here a rank has both in turn."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(group, 1)
    head = RemoteHead(lossd.connect(server).head(name), group=group, average=2)
    for seed in range(2):
        hidden, labels, _ = (distribute_tensor(one, mesh, [Shard(0)]) for one in whole(seed))
        linear_cross_entropy(hidden, labels, head).backward()
    return head.flush().gradient


def test_the_gradient_is_divided_by_the_number_of_batches(
    ranks: Ranks, server: lossd.Server, make_remote: Callable[..., RemoteHead]
) -> None:
    head = make_remote()
    weight = weights_of(head).requires_grad_()
    for seed in range(2):
        hidden, labels, _ = whole(seed)
        (F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten()) / 2).backward()
    found = ranks.run(averaged, server.target, head.name)[0]
    torch.testing.assert_close(found, weight.grad, rtol=1e-5, atol=1e-6)
