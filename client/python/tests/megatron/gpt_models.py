"""Small GPTModels on the CPU, whole or over two ranks, and what their own output layer makes of a batch."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lossd

VOCABULARY, HIDDEN, LENGTH, SAMPLES = 32, 16, 8, 2
EXACT = 1e-6


@dataclass(frozen=True)
class Layout:
    """tp ranks of two share the model's tensors; of 1 both have the whole model, and batches of their own."""

    tp: int = 1
    sequence: bool = False
    mtp: int = 0
    length: int = LENGTH
    pp: int = 1

    @property
    def dp(self) -> int:
        return 2 // self.tp // self.pp


@functools.cache
def on_the_cpu() -> None:
    """Megatron asks CUDA which device is current, and keeps its random numbers, even where it has no use for either."""
    warnings.filterwarnings("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import torch_norm

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    # PyTorch's LayerNorm would do for sequence parallelism, too, but is refused for it.
    torch_norm.WrappedTorchNorm.__new__ = lambda cls, config, hidden_size, eps=1e-5, **_: layer_norm(
        hidden_size, eps, config.sequence_parallel
    )


class WithoutCuda(torch.overrides.TorchFunctionMode):
    """What Megatron's optimizers ask of CUDA by name, the CPU does."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if function is torch.Tensor.cuda:
            return given[0]
        if function is torch.Tensor.type and len(given) == 1 and not named:
            return function(*given).replace("torch.", "torch.cuda.")
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*given, **named)


def layer_norm(size: int, eps: float, sequence_parallel: bool) -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = sequence_parallel
    return norm


@contextlib.contextmanager
def parallel(layout: Layout) -> Iterator[None]:
    on_the_cpu()
    from megatron.core import parallel_state

    groups = dist.distributed_c10d._world.pg_map
    before = list(groups)
    parallel_state.initialize_model_parallel(layout.tp, layout.pp)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron leaves them: some thirty a test, with threads that wake up all the time.
        for group in [one for one in groups if one not in before]:
            dist.destroy_process_group(group)


def model_of(layout: Layout, *, tied: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    made = TransformerConfig(
        num_layers=layout.pp,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        sequence_parallel=layout.sequence,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        mtp_num_layers=layout.mtp or None,
        init_method_std=0.3,
        params_dtype=dtype,
        **config,
    )
    spec = get_gpt_layer_local_spec()
    last = layout.pp == 1 or dist.get_rank() == 1
    mtp = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False) if layout.mtp and last else None
    return GPTModel(
        made,
        spec,
        VOCABULARY,
        LENGTH,
        mtp_block_spec=mtp,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        pre_process=layout.pp == 1 or dist.get_rank() == 0,
        post_process=last,
    )


def batch(layout: Layout, step: int = 0) -> dict[str, Tensor]:
    """The arguments of a model. Ranks that share its tensors have the same; others have their own."""
    seed = step if layout.dp == 1 else 100 * dist.get_rank() + step
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (SAMPLES, layout.length + 1), generator=generator)
    mask = (torch.rand(SAMPLES, layout.length, generator=generator) > 0.3).float()
    length = layout.length
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(length)[None].expand(SAMPLES, length),
        "attention_mask": torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None],
        "loss_mask": mask,
    }


def objective(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def twins(layout: Layout, **options: Any) -> tuple[Any, Any]:
    """Two models of the same weights, the second one to be changed."""
    return model_of(layout, **options), model_of(layout, **options)


def client_of(target: str) -> lossd.Client:
    return lossd.connect(target)


def gathered_rows(own: Tensor, layout: Layout) -> Tensor:
    """[V, H] of every rank's rows; of ranks with all rows their sum."""
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts) if layout.tp == 2 else parts[0] + parts[1]


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found - wanted).norm() / max(float(wanted.norm()), 1e-30))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], *, but: tuple[str, ...] = ()) -> None:
    assert set(found) - set(but) == set(wanted) - set(but)
    for name in set(wanted) - set(but):
        # Such as a key's bias, which makes no difference: its gradient is rounding.
        noise = 1e-7 * max(float(one.norm()) for one in wanted.values())
        error = float((found[name].double() - wanted[name].double()).norm())
        assert error <= 2 * EXACT * float(wanted[name].norm()) + noise, (name, error, float(wanted[name].norm()))
