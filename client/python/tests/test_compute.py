"""What Session.compute takes and gives, of NumPy and of PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import pairwise

import lossd

V, H = 32, 16
MakeHead = Callable[..., lossd.Head]


def weights_of(dtype: Any = torch.float32) -> Any:
    return (torch.randn(V, H, generator=torch.Generator().manual_seed(3)) * 0.5).to(dtype)


def batch(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, H, generator=random).to(dtype)
    return hidden, torch.randint(0, V, shape, generator=random)


def local(hidden: Any, labels: Any, weights: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Loss, dX and dW of torch's own."""
    x = hidden.float().reshape(-1, H).requires_grad_()
    w = weights.float().clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ w.T, labels.reshape(-1), **{"reduction": "sum", **options})
    loss.backward()
    return loss.detach(), x.grad.reshape(hidden.shape), w.grad


@pairwise(shape=[(7,), (2, 5), (2, 1, 3), ()], dtype=["float32", "bfloat16", "float16"], kind=["numpy", "torch"])
def test_kinds_dtypes_and_shapes(make_head: MakeHead, kind: str, dtype: str, shape: tuple[int, ...]) -> None:
    weights = weights_of(getattr(torch, dtype))
    head = make_head(V, H, dtype, weights=weights)
    hidden, labels = batch(*shape, dtype=getattr(torch, dtype))
    given_hidden, given_labels, options = hidden, labels, {}
    if kind == "numpy":
        given_labels = labels.numpy()
        given_hidden = hidden.view(torch.uint16).numpy() if dtype == "bfloat16" else hidden.numpy()
        options = {"hidden_dtype": dtype}
    with head.open_session() as session:
        result = session.compute(given_hidden, given_labels, **options)
    loss, dx, dw = local(hidden, labels, weights)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    assert result.loss == pytest.approx(loss.item(), rel=tolerance)
    assert tuple(result.losses.shape) == shape and tuple(result.dx.shape) == (*shape, H)
    if kind == "numpy":
        assert isinstance(result.dx, np.ndarray) and result.dx.dtype == given_hidden.dtype
        got = torch.from_numpy(result.dx)
        got = got.view(torch.bfloat16) if dtype == "bfloat16" else got
    else:
        assert torch.is_tensor(result.dx) and torch.is_tensor(result.losses) and result.dx.dtype == hidden.dtype
        got = result.dx
    torch.testing.assert_close(got.float(), dx, rtol=tolerance, atol=tolerance)
    gradient = torch.from_numpy(head.flush().gradient)
    torch.testing.assert_close(gradient, dw, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("integers", [np.int64, np.int32, np.uint16])
def test_kept_tokens_of_any_integers(make_head: MakeHead, integers: Any) -> None:
    weights = weights_of()
    head = make_head(V, H, "float32", weights=weights)
    hidden, labels = batch(2, 5)
    ids = np.stack([labels.reshape(-1).numpy(), (labels.reshape(-1).numpy() + 7) % V], 1)
    offsets = np.arange(11) * 2
    with head.open_session() as session:
        result = session.compute(
            hidden, labels, kept_tokens=(offsets.astype(integers), ids.reshape(-1).astype(integers)), dx=False
        )
        with pytest.raises(lossd.InvalidArgumentError, match="has already"):
            session.compute(hidden, labels, kept_tokens=(offsets, ids[:, :1].repeat(2, 1).reshape(-1)))
    logits = (hidden.reshape(-1, H) @ weights.T).gather(1, torch.from_numpy(ids))
    torch.testing.assert_close(result.losses.reshape(-1), -logits.log_softmax(1)[:, 0], rtol=1e-5, atol=1e-5)


def test_target_lists_of_arrays(make_head: MakeHead) -> None:
    weights = weights_of()
    head = make_head(V, H, "float32", weights=weights)
    hidden, labels = batch(2, 5)
    ids = np.stack([labels.reshape(-1).numpy(), (labels.reshape(-1).numpy() + 7) % V], 1)
    offsets, wanted = np.arange(11) * 2, np.tile([0.5, 0.25], 10)
    with head.open_session() as session:
        lists = lossd.TargetLists(offsets, ids.reshape(-1), wanted)
        result = session.compute(hidden, labels, target_lists=lists, returns=["divergences"], dx=False)
        with pytest.raises(TypeError, match="target_lists is a tuple; want lossd.TargetLists"):
            session.compute(hidden, labels, target_lists=(offsets, ids))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="target_lists.probabilities has shape"):
            session.compute(hidden, labels, target_lists=lossd.TargetLists(offsets, ids.reshape(-1), wanted[1:]))
        with pytest.raises(lossd.InvalidArgumentError, match="has already"):
            twice = ids[:, :1].repeat(2, 1).reshape(-1)
            session.compute(hidden, labels, target_lists=lossd.TargetLists(offsets, twice, wanted))
    p = (hidden.reshape(-1, H) @ weights.T).softmax(1).gather(1, torch.from_numpy(ids))
    rest = 0.25 * torch.log(0.25 / (1 - p.sum(1)))
    divergence = 0.5 * torch.log(0.5 / p[:, 0]) + 0.25 * torch.log(0.25 / p[:, 1]) + rest
    torch.testing.assert_close(result.losses.reshape(-1), divergence, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.divergences, result.losses)


def strided(hidden: Any, how: str) -> Any:
    """The same values with other strides."""
    if how == "transposed":
        return hidden.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "every other":
        wide = torch.zeros(hidden.shape[0], hidden.shape[1] * 2, H)
        wide[:, ::2] = hidden
        return wide[:, ::2]
    if how == "part of a row":
        wide = torch.zeros(*hidden.shape[:-1], H + 3)
        wide[..., 2 : 2 + H] = hidden
        return wide[..., 2 : 2 + H]
    return hidden.flip(1).numpy()[:, ::-1]  # negative strides, which only NumPy has


STRIDES = [(how, kind) for how in ("transposed", "every other", "part of a row") for kind in ("numpy", "torch")]


@pytest.mark.parametrize("how, kind", [*STRIDES, ("backwards", "numpy")])
def test_strides(make_head: MakeHead, how: str, kind: str) -> None:
    head = make_head(V, H)
    hidden, labels = batch(3, 4)
    other = strided(hidden, how)
    if kind == "numpy" and torch.is_tensor(other):
        other = other.numpy()
    with head.open_session() as session:
        wanted = session.compute(hidden, labels)
        got = session.compute(other, labels)
    assert torch.equal(torch.as_tensor(np.asarray(got.dx)), wanted.dx)
    assert torch.equal(torch.as_tensor(np.asarray(got.losses)), wanted.losses)


def test_expanded_hidden_states(make_head: MakeHead) -> None:
    head = make_head(V, H)
    hidden, labels = batch(1)
    with head.open_session() as session:
        one = session.compute(hidden, labels)
        many = session.compute(hidden.expand(5, H), labels.expand(5))
    assert torch.equal(many.losses, one.losses.expand(5)) and many.dx.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_labels_of_other_integers(make_head: MakeHead, dtype: Any, kind: str) -> None:
    head = make_head(V, H)
    hidden, labels = batch(6)
    wanted_labels = labels.clone()
    labels = labels.to(dtype)
    with head.open_session() as session:
        wanted = session.compute(hidden, wanted_labels)
        got = session.compute(hidden, labels.numpy() if kind == "numpy" else labels)
    assert torch.equal(got.losses, wanted.losses)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_no_tokens(make_head: MakeHead, kind: str, shape: tuple[int, ...], reduction: str) -> None:
    head = make_head(V, H)
    hidden, labels = torch.zeros(*shape, H), torch.zeros(shape, dtype=torch.int64)
    if kind == "numpy":
        hidden, labels = hidden.numpy(), labels.numpy()
    with head.open_session() as session:
        result = session.compute(hidden, labels, reduction=reduction, returns=["log_sum_exp"], top_k=2)
        assert result.loss == 0 and tuple(result.dx.shape) == (*shape, H) and tuple(result.losses.shape) == shape
        assert tuple(result.top_tokens.shape) == (*shape, 2) and result.valid_tokens == 0
        assert np.isnan(session.compute(hidden, labels, reduction="mean", torch_compat=True).loss)
    assert not head.flush().gradient.any()


def test_lists_and_objects_with_an_array_interface(make_head: MakeHead) -> None:
    head = make_head(V, H)
    hidden, labels = batch(2)

    class Wrapped:
        __array_interface__ = hidden.numpy().__array_interface__

    class Exported:
        def __dlpack__(self, **options: Any) -> Any:
            return hidden.numpy().__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return hidden.numpy().__dlpack_device__()

    with head.open_session() as session:
        wanted = session.compute(hidden.numpy(), labels.tolist())
        for other in (Wrapped(), Exported()):
            got = session.compute(other, labels)
            assert isinstance(got.dx, np.ndarray) and np.array_equal(got.dx, wanted.dx)


def test_ml_dtypes_bfloat16(make_head: MakeHead) -> None:
    import ml_dtypes

    head = make_head(V, H)
    hidden, labels = batch(4, dtype=torch.bfloat16)
    with head.open_session() as session:
        wanted = session.compute(hidden, labels)
        got = session.compute(hidden.view(torch.uint16).numpy().view(ml_dtypes.bfloat16), labels)
    assert got.dx.dtype == ml_dtypes.bfloat16
    assert np.array_equal(got.dx.view(np.uint16), wanted.dx.view(torch.uint16).numpy())


def test_big_endian_arrays_are_converted(make_head: MakeHead) -> None:
    head = make_head(V, H)
    hidden, labels = batch(4)
    with head.open_session() as session:
        wanted = session.compute(hidden.numpy(), labels.numpy())
        got = session.compute(hidden.numpy().astype(">f4"), labels.numpy().astype(">i8"))
    assert np.array_equal(got.losses, wanted.losses)


def test_dtype_of_dx(make_head: MakeHead) -> None:
    head = make_head(V, H)
    hidden, labels = batch(4, dtype=torch.bfloat16)
    with head.open_session() as session:
        assert session.compute(hidden, labels, dx_dtype="float32").dx.dtype == torch.float32
        assert session.compute(hidden, labels, dx_dtype=torch.float16).dx.dtype == torch.float16
        assert session.compute(hidden, labels, dx=False).dx is None
        assert session.compute(hidden, labels, mode="loss").dx is None
        assert session.compute(hidden, labels, losses=False).losses is None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_dx_the_rest_is_the_same_and_less_is_received(
    make_head: MakeHead, dtype: str, deterministic: bool
) -> None:
    tokens, hidden_size = 64, 256
    hidden = torch.randn(tokens, hidden_size, dtype=getattr(torch, dtype))
    labels = torch.randint(V, (tokens,))
    results = {}
    for dx in (True, False):
        head = make_head(V, hidden_size, dtype, bias=True)
        with head.open_session(chunk_bytes=1 << 13, deterministic=deterministic) as session:
            before = head.client.traffic().bytes_received
            options = {"label_smoothing": 0.1, "lse_square_scale": 1e-3, "returns": ["entropies"]}
            result = session.compute(hidden, labels, dx=dx, **options)
            received = head.client.traffic().bytes_received - before
            assert result.chunks > 1 and (result.dx is None) is not dx
            bias = np.empty(V, np.float32)
            flushed = head.flush(bias_out=bias)  # waits for what was answered and is still being added
            assert flushed.window_tokens == tokens
            gradient = flushed.gradient
        results[dx] = received, result.losses, result.entropies, gradient, bias
    (with_dx, *expected), (without, *got) = results[True], results[False]
    assert with_dx - without >= tokens * hidden_size * hidden.element_size() and without < with_dx / 4
    for one, other in zip(expected, got, strict=True):
        assert np.array_equal(one, other)


def test_what_is_sent_again_without_dx_counts_once(make_head: MakeHead) -> None:
    head = make_head(V, H)
    hidden, labels = batch(4)
    first = head.open_session(client_key="again")
    result = first.compute(hidden, labels, dx=False)
    second = head.open_session(client_key="again")
    second.resume_at(result.first_sequences)
    again = second.compute(hidden, labels, dx=False)
    assert again.repeated_chunks == again.chunks > 0
    assert torch.equal(again.losses, result.losses) and head.flush().window_tokens == 4


def test_a_frozen_head_without_dx_only_looks(make_head: MakeHead) -> None:
    head = make_head(V, H, frozen=True)
    hidden, labels = batch(4)
    with head.open_session() as session:
        wanted = session.compute(hidden, labels, mode="loss")
        assert torch.equal(session.compute(hidden, labels, dx=False).losses, wanted.losses)


def test_arrays_of_the_caller(make_head: MakeHead) -> None:
    head = make_head(V, H)
    hidden, labels = batch(2, 3)
    with head.open_session() as session:
        wanted = session.compute(hidden, labels, returns=["predictions"], top_k=2)
        names = ("losses", "dx", "predictions", "top_tokens", "top_log_probabilities")
        out = {name: torch.full_like(getattr(wanted, name), 7) for name in names}
        got = session.compute(hidden, labels, top_k=2, out=out)
        for name in names:
            assert getattr(got, name) is out[name] and torch.equal(out[name], getattr(wanted, name))
        mine = torch.zeros(2, 3, H)
        assert session.compute(hidden, labels, dx=mine).dx is mine and torch.equal(mine, wanted.dx)


RETURNS = ("log_sum_exp", "z_losses", "log_probabilities", "entropies", "predictions", "target_ranks")


def test_returns(make_head: MakeHead) -> None:
    weights = weights_of()
    head = make_head(V, H, weights=weights)
    hidden, labels = batch(2, 3)
    labels[0, 1] = -100
    with head.open_session() as session:
        result = session.compute(hidden, labels, mode="loss", returns=RETURNS, top_k=3, lse_square_scale=0.1)
    logits = hidden @ weights.T
    valid = labels != -100
    lse = logits.logsumexp(-1)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(result.log_sum_exp, torch.where(valid, lse, 0), **close)
    torch.testing.assert_close(result.z_losses, torch.where(valid, 0.1 * lse**2, 0), **close)
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(result.entropies, torch.where(valid, -(log_p * log_p.exp()).sum(-1), 0), **close)
    label_log_p = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(result.log_probabilities, torch.where(valid, label_log_p, 0), **close)
    assert torch.equal(result.predictions, torch.where(valid, logits.argmax(-1), -1).int())
    ranks = (log_p > label_log_p[..., None]).sum(-1)
    assert torch.equal(result.target_ranks, torch.where(valid, ranks, -1).int())
    assert torch.equal(result.top_tokens[valid], logits.topk(3).indices[valid].int())
    torch.testing.assert_close(result.top_log_probabilities[valid], log_p.topk(3).values[valid], **close)
    assert result.correct_tokens == int((logits.argmax(-1) == labels).sum())


@pytest.mark.parametrize(
    "options, torch_options",
    [
        ({"reduction": "mean"}, {"reduction": "mean"}),
        ({"ignore_index": 3}, {"ignore_index": 3}),
        ({"ignore_index": 3, "reduction": "mean"}, {"ignore_index": 3, "reduction": "mean"}),
        ({"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
    ],
)
def test_options_as_in_torch(make_head: MakeHead, options: dict[str, Any], torch_options: dict[str, Any]) -> None:
    weights = weights_of()
    head = make_head(V, H, weights=weights)
    hidden, labels = batch(40)
    assert (labels == 3).any()
    with head.open_session() as session:
        result = session.compute(hidden, labels, **options)
    loss, dx, dw = local(hidden, labels, weights, **torch_options)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(result.dx, dx, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(head.flush().gradient), dw, rtol=1e-4, atol=1e-6)


def gradients_of(loss: Any, *leaves: Any) -> tuple[Any, ...]:
    return tuple(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("case", ["scale", "softcap", "token_weights", "lse_gradients", "z", "gradient_scale"])
def test_other_options(make_head: MakeHead, case: str) -> None:
    weights = weights_of()
    head = make_head(V, H, weights=weights)
    hidden, labels = batch(12)
    x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    logits = x @ w.T
    ce = torch.nn.functional.cross_entropy
    factors = torch.rand(12, generator=torch.Generator().manual_seed(5))
    if case == "scale":
        options, loss = {"logit_scale": 0.7}, ce(0.7 * logits, labels, reduction="sum")
    elif case == "softcap":
        options, loss = {"softcap": 2.0}, ce(2 * torch.tanh(logits / 2), labels, reduction="sum")
    elif case == "token_weights":
        options, loss = {"token_weights": factors.numpy()}, (factors * ce(logits, labels, reduction="none")).sum()
    elif case == "lse_gradients":
        options = {"lse_gradients": factors, "token_weights": torch.zeros(12)}
        loss = (factors * logits.logsumexp(-1)).sum()
    elif case == "z":
        options = {"lse_square_scale": 0.3}
        loss = ce(logits, labels, reduction="sum") + 0.3 * (logits.logsumexp(-1) ** 2).sum()
    else:
        options, loss = {"gradient_scale": torch.tensor(2.5)}, 2.5 * ce(logits, labels, reduction="sum")
    dx, dw = gradients_of(loss, x, w)
    with head.open_session() as session:
        result = session.compute(hidden, labels, **options)
    torch.testing.assert_close(result.dx, dx, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(head.flush().gradient), dw, rtol=1e-4, atol=1e-5)


def test_class_weights_and_bias(make_head: MakeHead) -> None:
    random = np.random.default_rng(8)
    class_weights, bias = random.random(V), random.standard_normal(V, np.float32)
    weights = weights_of()
    head = make_head(V, H, weights=None, class_weights=class_weights, bias=True)
    head.write_weights(weights, bias)
    hidden, labels = batch(9)
    x = hidden.clone().requires_grad_()
    factors = torch.from_numpy(class_weights).float()
    both = torch.nn.functional.cross_entropy(x @ weights.T + torch.from_numpy(bias), labels, factors, reduction="sum")
    (dx,) = gradients_of(both, x)
    with head.open_session() as session:
        result = session.compute(hidden, labels)
        plain = session.compute(hidden, labels, class_weights="ignore", bias="ignore", mode="loss")
    assert result.loss == pytest.approx(both.item(), rel=1e-5)
    torch.testing.assert_close(result.dx, dx, rtol=1e-4, atol=1e-5)
    assert result.class_weight_sum == pytest.approx(class_weights[labels].sum(), rel=1e-5)
    assert plain.loss == pytest.approx(local(hidden, labels, weights)[0].item(), rel=1e-5)
    flushed = head.flush()
    assert flushed.bias_gradient.shape == (V,) and flushed.bias_norm > 0


def test_distillation(make_head: MakeHead) -> None:
    weights, teacher_weights = weights_of(), torch.randn(V, 8, generator=torch.Generator().manual_seed(9))
    head, teacher = make_head(V, H, weights=weights), make_head(V, 8, weights=teacher_weights, frozen=True)
    hidden, labels = batch(2, 3)
    teacher_hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(10))
    x = hidden.clone().requires_grad_()
    target = (teacher_hidden @ teacher_weights.T / 2).log_softmax(-1)
    kl = torch.nn.functional.kl_div((x @ weights.T / 2).log_softmax(-1), target, reduction="sum", log_target=True)
    (dx,) = gradients_of(0.5 * kl, x)
    wanted = lossd.Distillation(teacher.name, teacher_hidden, temperature=2.0, weight=0.5)
    with head.open_session() as session:
        result = session.compute(hidden, labels, distillation=wanted, returns=["divergences"])
    assert result.divergence_sum == pytest.approx(kl.item(), rel=1e-4)
    assert result.divergences.sum().item() == pytest.approx(kl.item(), rel=1e-4)
    torch.testing.assert_close(result.dx, dx, rtol=1e-3, atol=1e-5)
    assert result.teacher_weight_version == 1


def test_late_mean(make_head: MakeHead) -> None:
    weights = weights_of()
    head = make_head(V, H, weights=weights)
    hidden, labels = batch(8)
    with head.open_session() as session:
        for rows in (slice(0, 3), slice(3, 8)):
            session.compute(hidden[rows], labels[rows], reduction="late_mean")
    _, _, dw = local(hidden, labels, weights, reduction="mean")
    torch.testing.assert_close(torch.from_numpy(head.flush(gradient_scale=1 / 8).gradient), dw, rtol=1e-4, atol=1e-6)


def test_regions(client: lossd.Client, make_head: MakeHead) -> None:
    head = make_head(V, H)
    hidden, labels = batch(64)
    with client.create_region("system", 64 * H * 4 * 2) as region, head.open_session() as session:
        wanted = session.compute(hidden, labels)
        x, dx = region.array((64, H)), region.tensor((64, H), offset=64 * H * 4)
        x[:] = hidden.numpy()
        sent = client.traffic().bytes_sent
        session.compute(x, labels, out={"dx": dx}, losses=False)
        assert client.traffic().bytes_sent - sent < hidden.numel() * 4  # they did not travel
        assert torch.equal(dx, wanted.dx)
        with pytest.raises(ValueError, match="not in a region"):
            region.array((64, H), offset=64 * H * 4 + 4096 * 4)
        back = np.zeros((64, H), np.float32)
        region.copy_in(hidden.numpy(), offset=0)
        region.copy_out(back, offset=0)
        assert np.array_equal(back, hidden.numpy())
        del x, dx


def test_the_signature_names_every_number_of_the_loss() -> None:
    shown = inspect.signature(lossd.Session.compute).parameters
    for name, default in {
        "label_smoothing": 0.0,
        "lse_square_scale": 0.0,
        "logit_scale": None,
        "softcap": None,
    }.items():
        assert shown[name].default == default
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())


def test_a_keyword_that_does_not_exist_is_named(make_head: MakeHead) -> None:
    with make_head(V, H, "float32").open_session() as session:
        with pytest.raises(TypeError, match=r"compute\(\) got an unexpected keyword argument 'smoothing'"):
            session.compute(*batch(3), smoothing=0.1)  # type: ignore[call-arg]
