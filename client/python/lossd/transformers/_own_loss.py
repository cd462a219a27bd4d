"""Whether a model's forward computes the loss that lossd would compute in its place.

Most forwards of transformers call `self.loss_function` with their logits and labels: their source says so. Any other
forward is run, with logits of this module's, and has to answer the loss that transformers' ForCausalLMLoss makes of the
logits that it returns.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lossd.transformers._state import aux_loss_coefficient

_ROWS, _LENGTH = 2, 8
# _CALL matches a loss of the labels as they are given, _AUXILIARY the auxiliary loss that aux_loss_coefficient knows.
_CALL = re.compile(
    r"self\.loss_function\((logits=)?(\w*logits), (labels=)?labels, (vocab_size=)?[\w.()\[\]-]+, \*\*(\w+)\)"
)
_AUXILIARY = re.compile(
    r"self(\.config(\.text_config|\.get_text_config\(\))?)?\.(router_)?aux_loss_coef \* (outputs\.)?aux_loss\.to\(.*\)"
)
_MOVED = re.compile(r"labels\.to\([\w.]+\)")
_OF_LIBRARIES = ("transformers.", "torch.")


def require_same_loss(model: nn.Module, linear: nn.Linear) -> None:
    """Raises ValueError, with what to do instead, unless the model's forward answers the loss that lossd computes."""
    if _calls_loss_function(type(model).forward):
        return
    reason = _difference(model, linear)
    if reason is not None:
        raise ValueError(
            f"model: the forward of {type(model).__name__} has a loss of its own: {reason}. patch() would train it by "
            "transformers' ForCausalLMLoss instead. Leave the model unpatched and call "
            "lossd.torch.linear_cross_entropy with its hidden states, your labels and a RemoteHead.from_linear of its "
            "output embeddings, or let its forward call self.loss_function(logits, labels, vocab_size, **kwargs)"
        )


@functools.cache
def _calls_loss_function(forward: Any) -> bool:
    """Whether the source of a forward shows that its loss is `self.loss_function` of its logits and labels.

    The auxiliary loss of a mixture of experts may be added. False wherever that is in doubt."""
    while hasattr(forward, "__wrapped__"):
        if not getattr(forward, "__globals__", {}).get("__name__", "").startswith(_OF_LIBRARIES):
            return False
        forward = forward.__wrapped__
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    values = [(target, ast.unparse(value), value.lineno) for target, value in _assignments(tree)]
    losses = [(text, line) for target, text, line in values if target == "loss" and text != "None"]
    calls = [(match, line) for text, line in losses if (match := _CALL.fullmatch(text))]
    if len(calls) != 1 or not all(_CALL.fullmatch(text) or _AUXILIARY.fullmatch(text) for text, _ in losses):
        return False
    call, called_at = calls[0]
    logits, options = call[2], call[5]
    changed = any(
        target == options
        or (target == "labels" and not _MOVED.fullmatch(text))
        or (target == logits and line > called_at)
        for target, text, line in values
    )
    return not changed and not _changes(tree, {"loss", "labels", logits, options}) and _answers(tree, logits)


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, node.value


def _changes(tree: ast.AST, names: set[str]) -> bool:
    """Whether one of these is changed in place, by a method of its own."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        and (node.attr.endswith("_") or node.attr in ("update", "setdefault"))
        for node in ast.walk(tree)
    )


def _answers(tree: ast.AST, logits: str) -> bool:
    """Whether every output is made of the loss as it is, and has these logits."""
    found = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if "loss" in given:
                found = True
                if given["loss"] != "loss" or given.get("logits") != logits:
                    return False
    return found


def _difference(model: Any, linear: nn.Linear) -> str | None:
    """What the forward's loss, in training and in evaluation, has that ForCausalLMLoss has not. None: nothing."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    takes = parameters_of(type(model).forward)
    devices = [linear.weight.device] if linear.weight.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            for training in (False, True):
                model.train(training)
                reason = _difference_now(model, linear, takes)
                if reason is not None:
                    return reason
    except Exception as error:  # noqa: BLE001, whatever a model of unknown source raises
        return f"lossd could not try it with {_ROWS} x {_LENGTH} tokens ({type(error).__name__}: {error})"
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return None


def _difference_now(model: Any, linear: nn.Linear, takes: Callable[[str], bool]) -> str | None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    batch = _batch(model, linear)
    options = {"num_items_in_batch": torch.tensor(5.0)} if takes("num_items_in_batch") else {}
    given = {name: value.clone() for name, value in (*batch.items(), *options.items()) if takes(name)}
    with _known_logits(linear):
        outputs = model.forward(**given, **({"return_dict": True} if takes("return_dict") else {}))
    loss, logits = getattr(outputs, "loss", None), getattr(outputs, "logits", None)
    if loss is None:
        return "it answers none for labels"
    if logits is None:
        return "it answers a loss without logits, as a fused loss does: patch it with fused_linear_cross_entropy=False"
    shapes = tuple(logits.shape), tuple(loss.shape)
    if shapes[0] != (_ROWS, _LENGTH, linear.out_features) or loss.numel() != 1:
        return f"it answers logits {shapes[0]} and loss {shapes[1]} for tokens {(_ROWS, _LENGTH)}"
    labels = batch["labels"].to(logits.device)
    expected, mean = (float(ForCausalLMLoss(logits, labels, linear.out_features, **one)) for one in (options, {}))
    if getattr(outputs, "aux_loss", None) is not None:
        expected += aux_loss_coefficient(model) * float(outputs.aux_loss)
    tolerance = 1e-4 if logits.dtype == torch.float32 else 5e-3
    if math.isclose(float(loss), expected, rel_tol=tolerance):
        return None
    if math.isclose(float(loss), mean, rel_tol=tolerance):
        return "it takes num_items_in_batch and ignores it"
    mode = "training" if model.training else "evaluation"
    return f"in {mode} it answers {float(loss):.6g} where ForCausalLMLoss of the same logits is {expected:.6g}"


def _batch(model: Any, linear: nn.Linear) -> dict[str, torch.Tensor]:
    """Tokens of text, whose labels are not all counted, and a mask of which a loss must not take note."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    special = {value for name, value in _numbers(model.config, config) if name.endswith(("_id", "_index"))}
    rows = model.get_input_embeddings().weight.shape[0]
    usual = torch.tensor([token for token in range(min(rows, linear.out_features, 4096)) if token not in special])
    tokens = usual[torch.randint(0, len(usual), (_ROWS, _LENGTH), generator=generator)]
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, 4] = -100
    mask[1, :3] = 0
    for place, token in enumerate(sorted(special)[: _LENGTH - 4]):
        if 0 <= token < linear.out_features:
            labels[1, 4 + place] = token
    device = model.get_input_embeddings().weight.device
    return {name: t.to(device) for name, t in (("input_ids", tokens), ("labels", labels), ("attention_mask", mask))}


def _numbers(*configs: Any) -> Iterator[tuple[str, int]]:
    for config in configs:
        for name, value in config.to_dict().items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, int):
                    yield name, each


@contextmanager
def _known_logits(linear: nn.Linear) -> Iterator[None]:
    """Within, the head answers logits that tell losses apart, whatever its weights are."""

    def answer(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(output.shape[-1])
        return torch.randn(output.shape, generator=generator).mul_(3).to(output.device)

    hook = linear.register_forward_hook(answer)
    try:
        yield
    finally:
        hook.remove()


def parameters_of(forward: Any) -> Callable[[str], bool]:
    """Says of a name whether the forward takes it."""
    parameters = inspect.signature(forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return lambda name: anything or name in parameters
