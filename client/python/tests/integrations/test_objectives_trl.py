"""lossd.torch.objectives against the losses of TRL's trainers, on the same numbers."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # before the experimental trainers are imported

import pytest
import torch
import trl
from cases import pairwise
from torch import Tensor
from trl.experimental.async_distillation.async_distillation_trainer import _add_tail_bucket, _jsd_divergence
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

import lossd
from lossd.torch import RemoteHead
from lossd.torch.objectives import (
    dpo_loss,
    entropy_bonus,
    gkd_loss,
    grpo_loss,
    kto_loss,
    orpo_loss,
    ppo_loss,
    sequence_log_probs,
    simpo_loss,
    topk_distillation_loss,
)

ROWS, TOKENS = 6, 9


def trainer(**fields: Any) -> Any:
    """As much of a trainer of TRL as its loss looks at, in one process."""

    def as_it_is(value: Any, **_: Any) -> Any:
        return value

    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=as_it_is, gather_for_metrics=as_it_is, reduce=as_it_is, num_processes=1,
        sync_gradients=True,
    )  # fmt: skip
    return SimpleNamespace(
        accelerator=accelerator, model=torch.nn.Module().train(), aux_loss_enabled=False, _tp_size=1,
        _total_train_tokens=0, _metrics={"train": defaultdict(list), "eval": defaultdict(list)}, **fields,
    )  # fmt: skip


def numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def log_probabilities(seed: int) -> Tensor:
    return -numbers(ROWS, TOKENS, seed=seed).abs() - 0.01


def completions(seed: int = 1) -> Tensor:
    """Which tokens are of completions, of different lengths, behind prompts of one token and more."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(0, 3, (ROWS, 1), generator=generator)
    ends = torch.randint(5, TOKENS + 1, (ROWS, 1), generator=generator)
    places = torch.arange(TOKENS)
    return (places >= begins) & (places < ends)


def assert_same(ours: Any, theirs: Any, *leaves: Tensor) -> None:
    """Values and gradients of both functions are the same to 1e-6 in fp32."""
    found = [leaf.clone().requires_grad_() for leaf in leaves]
    wanted = [leaf.clone().requires_grad_() for leaf in leaves]
    got, want = ours(*found), theirs(*wanted)
    assert got.dtype == torch.float32 and got.shape == ()
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    got.backward()
    want.backward()
    for one, other in zip(found, wanted, strict=True):
        assert other.grad is not None and other.grad.any() and one.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-6 * other.grad.norm()


@pytest.mark.parametrize("beta", [0.1, 1.5])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sigmoid_norm"])
def test_dpo(loss_type: str, beta: float) -> None:
    mask, reference = completions(), sequence_log_probs(log_probabilities(3), completions())
    average = loss_type != "sigmoid"

    def ours(log_probs: Tensor) -> Tensor:
        sums = sequence_log_probs(log_probs, mask, average=average)
        of_reference = sequence_log_probs(log_probabilities(3), mask, average=average)
        return dpo_loss(
            *sums.chunk(2), *of_reference.chunk(2), beta=beta, loss_type=loss_type.removesuffix("_norm")
        )  # fmt: skip

    def theirs(log_probs: Tensor) -> Tensor:
        state = trainer(
            beta=beta, loss_types=[loss_type], loss_weights=[1.0], ld_alpha=None, f_divergence_type="reverse_kl",
            use_weighting=False, precompute_ref_logps=True,
        )  # fmt: skip
        values = torch.zeros(ROWS, TOKENS)
        outputs = SimpleNamespace(log_probs=log_probs * mask, entropy=values, mean_logits=values, is_top1=values.bool())
        chosen, rejected = reference.chunk(2)
        inputs = {
            "input_ids": torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64),
            "attention_mask": torch.ones(ROWS, TOKENS + 1),
            "completion_mask": torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), mask.long()], 1),
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        }
        return trl.DPOTrainer._compute_loss(state, lambda **_: outputs, inputs, False)

    assert_same(ours, theirs, log_probabilities(2))


def trl_grpo(log_probs: Tensor, entropies: Tensor, inputs: dict[str, Any], **options: Any) -> Tensor:
    """GRPOTrainer's loss with its defaults, but for `options`."""
    fields = {
        "loss_type": "dapo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": 40,
        "importance_sampling_level": "token", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "use_vllm": False, "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False, "vllm_importance_sampling_correction": False,
    }  # fmt: skip
    delta = options.pop("delta", None)
    corrected = options.pop("use_bias_correction_kl", trl.GRPOConfig.use_bias_correction_kl)
    arguments = SimpleNamespace(delta=delta, use_bias_correction_kl=corrected, steps_per_generation=1)
    state = trainer(args=arguments, **{**fields, **options})
    state._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropies, None)
    mask = inputs["completion_mask"]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "num_items_in_batch": mask.sum(), **inputs}
    return trl.GRPOTrainer._compute_loss(state, None, inputs)


VARIANTS: dict[str, dict[str, Any]] = {
    # What TRL calls them, where it is not what we do.
    "dapo": {},
    "bnpo": {"loss_type": "bnpo"},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 40},
    "clip_higher": {"epsilon": 0.1, "epsilon_high": 0.4},
    "dual_clip": {"epsilon": 0.1, "delta": 1.3},
    "kl": {"beta": 0.3},
    "kl_of_the_paper": {"beta": 0.3, "use_bias_correction_kl": False, "loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo_and_kl": {"importance_sampling_level": "sequence", "beta": 0.3, "delta": 1.5},
}


@pairwise(variant=list(VARIANTS), on_policy=[False, True], of_tokens=[False, True])
def test_grpo(variant: str, on_policy: bool, of_tokens: bool) -> None:
    options, mask = VARIANTS[variant], completions(4)
    log_probs = log_probabilities(2)
    old = None if on_policy else log_probs + numbers(ROWS, TOKENS, seed=5, scale=0.4)
    reference = log_probs + numbers(ROWS, TOKENS, seed=6, scale=0.4)
    advantages = 0.3 + numbers(*((ROWS, TOKENS) if of_tokens else (ROWS,)), seed=7)
    ref_log_probs = reference if options.get("beta") else None

    def ours(log_probs: Tensor) -> Tensor:
        return grpo_loss(log_probs, old, advantages, mask, ref_log_probs=ref_log_probs, **options)

    def theirs(log_probs: Tensor) -> Tensor:
        inputs = {"completion_mask": mask.long(), "advantages": advantages, "ref_per_token_logps": reference}
        if old is not None:
            inputs["old_per_token_logps"] = old
        names = {key: value for key, value in options.items() if key != "epsilon"}
        low = options.get("epsilon", 0.2)
        clip = {"epsilon_low": low, "epsilon_high": options.get("epsilon_high", low)}
        return trl_grpo(log_probs, torch.zeros(ROWS, TOKENS), inputs, **{**names, **clip})

    assert_same(ours, theirs, log_probs)


def test_grpo_over_micro_batches_is_over_the_whole_step() -> None:
    mask, advantages = completions(4), numbers(ROWS, seed=7)
    log_probs = log_probabilities(2)
    old = log_probs + numbers(ROWS, TOKENS, seed=5, scale=0.4)

    def ours(log_probs: Tensor) -> Tensor:
        parts = ((log_probs[rows], old[rows], advantages[rows], mask[rows]) for rows in ([0], [1, 2, 3], [4, 5]))
        return sum((grpo_loss(*part, normalizer=mask.sum()) for part in parts), torch.zeros(()))

    def theirs(log_probs: Tensor) -> Tensor:
        inputs = {"completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old}
        return trl_grpo(log_probs, torch.zeros(ROWS, TOKENS), inputs)

    assert_same(ours, theirs, log_probs)


@pytest.mark.parametrize("delta", [None, 1.3])
def test_ppo_is_grpo_of_each_tokens_advantage(delta: float | None) -> None:
    mask, advantages = completions(4), numbers(ROWS, TOKENS, seed=7)
    log_probs = log_probabilities(2)
    old = log_probs + numbers(ROWS, TOKENS, seed=5, scale=0.4)

    def ours(log_probs: Tensor) -> Tensor:
        packed = (one[mask] for one in (log_probs, old, advantages))
        return ppo_loss(*packed, torch.ones(int(mask.sum()), dtype=torch.bool), delta=delta)

    def theirs(log_probs: Tensor) -> Tensor:
        inputs = {"completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old}
        return trl_grpo(log_probs, torch.zeros(ROWS, TOKENS), inputs, loss_type="bnpo", delta=delta)

    assert_same(ours, theirs, log_probs)


def test_the_entropy_bonus_of_grpo() -> None:
    mask, advantages = completions(4), numbers(ROWS, seed=7)
    entropies = 1.0 + numbers(ROWS, TOKENS, seed=8).abs()

    def ours(log_probs: Tensor, entropies: Tensor) -> Tensor:
        return grpo_loss(log_probs, None, advantages, mask, loss_type="grpo") - 0.2 * entropy_bonus(entropies, mask)

    def theirs(log_probs: Tensor, entropies: Tensor) -> Tensor:
        inputs = {"completion_mask": mask.long(), "advantages": advantages}
        options = {"loss_type": "grpo", "_entropy_bonus_enabled": True, "entropy_coef": 0.2}
        return trl_grpo(log_probs, entropies, inputs, **options)

    assert_same(ours, theirs, log_probabilities(2), entropies)


@pairwise(liked=["some", "all", "none"], loss_type=["kto", "apo_zero_unpaired"], shift=[-0.5, 0.5])
def test_kto(loss_type: str, liked: str, shift: float) -> None:
    mask = completions()
    reference = sequence_log_probs(log_probabilities(3), mask)
    desirable = {"some": torch.tensor([True, False, False, True, True, False])}.get(
        liked, torch.full((ROWS,), liked == "all")
    )
    others = numbers(ROWS, seed=9)
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}

    def ours(log_probs: Tensor) -> Tensor:
        kl = torch.tensor(shift) if loss_type == "kto" else 0.0
        sums = sequence_log_probs(log_probs, mask)
        return kto_loss(sums, reference, desirable, kl, beta=0.3, **weights)

    def theirs(log_probs: Tensor) -> Tensor:
        state = trainer(
            beta=0.3, loss_type=loss_type, calculate_KL=loss_type == "kto", precompute_ref_logps=True, **weights,
            _compute_kl_logps=lambda *_: others + shift,
        )  # fmt: skip
        values = torch.zeros(ROWS, TOKENS)
        outputs = SimpleNamespace(log_probs=log_probs * mask, entropy=values, mean_logits=values, is_top1=values.bool())
        batch = {
            "input_ids": torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64),
            "attention_mask": torch.ones(ROWS, TOKENS + 1),
            "completion_mask": torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), mask.long()], 1),
            "label": desirable,
            "ref_logps": reference,
            "ref_KL_logps": others,
        }
        return trl.KTOTrainer._compute_loss(state, lambda **_: outputs, batch, False)

    assert_same(ours, theirs, log_probabilities(2))


def trl_pairs(kind: type, state: Any, chosen: Tensor, rejected: Tensor, nll: Tensor) -> Tensor:
    """The loss of a trainer that needs no reference, with log-probabilities in place of its forward pass."""
    logits = torch.zeros(1)
    state.concatenated_forward = lambda *_: (chosen, rejected, logits, logits, nll)
    for name in ("odds_ratio_loss", "cpo_loss"):
        if hasattr(kind, name):
            setattr(state, name, getattr(kind, name).__get__(state))
    return kind.get_batch_loss_metrics(state, None, {})[0]


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_orpo(scale: float) -> None:
    mask, nll = completions(), torch.tensor(1.7)

    def averages(log_probs: Tensor) -> tuple[Tensor, ...]:
        return sequence_log_probs(scale * log_probs, mask, average=True).chunk(2)

    assert_same(
        lambda log_probs, nll: orpo_loss(*averages(log_probs), nll, beta=0.4),
        lambda log_probs, nll: trl_pairs(ORPOTrainer, trainer(beta=0.4), *averages(log_probs), nll),
        log_probabilities(2),
        nll,
    )


def test_simpo() -> None:
    mask = completions()

    def averages(log_probs: Tensor) -> tuple[Tensor, ...]:
        return sequence_log_probs(log_probs, mask, average=True).chunk(2)

    state = trainer(beta=2.0, simpo_gamma=1.1, loss_type="simpo", alpha=0.0, label_smoothing=0.0, cpo_alpha=0.0)
    assert_same(
        lambda log_probs: simpo_loss(*averages(log_probs), beta=2.0, gamma=1.1),
        lambda log_probs: trl_pairs(CPOTrainer, state, *averages(log_probs), torch.zeros(())),
        log_probabilities(2),
    )


def test_defaults_are_those_of_trl() -> None:
    def default(function: Any, name: str) -> Any:
        return inspect.signature(function).parameters[name].default

    for config, function, names in (
        (trl.DPOConfig, dpo_loss, ("beta",)),
        (trl.KTOConfig, kto_loss, ("beta", "desirable_weight", "undesirable_weight")),
        (ORPOConfig, orpo_loss, ("beta",)),
        (CPOConfig, simpo_loss, ("beta",)),
        (trl.GRPOConfig, grpo_loss, (
            "beta", "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level",
            "use_bias_correction_kl",
        )),
    ):  # fmt: skip
        for name in names:
            assert default(function, name) == default(config, name), (config.__name__, name)
    assert default(simpo_loss, "gamma") == default(CPOConfig, "simpo_gamma")


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("trainer", "temperature"), [("gkd", 1.0), ("gkd", 2.0), ("distillation", 2.0)])
def test_gkd(client: lossd.Client, name: str, beta: float, trainer: str, temperature: float) -> None:
    student_weight, teacher_weight = numbers(61, 24, seed=1, scale=0.4), numbers(61, 16, seed=2, scale=0.4)
    student = RemoteHead.create(client, f"{name}student", 61, 24, weights=student_weight, dtype=torch.float32)
    teacher = RemoteHead.create(
        client, f"{name}teacher", 61, 16, weights=teacher_weight, dtype=torch.float32, frozen=True
    )
    hidden, of_teacher = numbers(ROWS, TOKENS, 24, seed=3), numbers(ROWS, TOKENS, 16, seed=4)
    labels = torch.randint(0, 61, (ROWS, TOKENS)).masked_fill(~completions(), -100)

    x = hidden.clone().requires_grad_()
    loss = gkd_loss(x, labels, student, teacher, of_teacher, beta=beta, temperature=temperature)
    loss.backward()

    theirs_x, theirs_weight = (one.double().requires_grad_() for one in (hidden, student_weight))
    if trainer == "gkd":
        logits = theirs_x @ theirs_weight.T, of_teacher.double() @ teacher_weight.double().T
        wanted = GKDTrainer.generalized_jsd_loss(*logits, labels, beta, temperature)
    else:
        inputs = theirs_x, of_teacher.double(), theirs_weight, teacher_weight.double()
        wanted, *_ = _chunked_divergence_loss(*inputs, labels != -100, beta, temperature=temperature)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for one, other in ((x.grad, theirs_x.grad), (student.flush().gradient, theirs_weight.grad)):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_topk_distillation(client: lossd.Client, name: str, temperature: float) -> None:
    weight = numbers(61, 24, seed=1, scale=0.4)
    head = RemoteHead.create(client, f"{name}student", 61, 24, weights=weight, dtype=torch.float32)
    hidden = numbers(ROWS, TOKENS, 24, seed=3)
    labels = torch.randint(0, 61, (ROWS, TOKENS)).masked_fill(~completions(), -100)
    log_probs, ids = (numbers(ROWS, TOKENS, 61, seed=4, scale=2.0) / temperature).log_softmax(-1).topk(5)
    ids[::2, :, 4], log_probs[::2, :, 4] = -1, -torch.inf  # as it fills its lists up

    x = hidden.clone().requires_grad_()
    loss = topk_distillation_loss(x, labels, head, ids, teacher_log_probs=log_probs, temperature=temperature)
    loss.backward()

    theirs_x, theirs_weight = (one.double().requires_grad_() for one in (hidden, weight))
    valid = ids >= 0
    of_student = (theirs_x @ theirs_weight.T / temperature).log_softmax(-1).gather(-1, ids.clamp(min=0))
    of_student, support = _add_tail_bucket(of_student.masked_fill(~valid, -torch.inf), valid)
    of_teacher, _ = _add_tail_bucket(log_probs.double(), valid)
    counted = labels != -100
    wanted = _jsd_divergence(of_student, of_teacher, 0.0, support)[counted].sum() / counted.sum()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for one, other in ((x.grad, theirs_x.grad), (head.flush().gradient, theirs_weight.grad)):
        assert (one - other).norm() <= 2e-6 * other.norm()
