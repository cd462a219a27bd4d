"""What the tests of megatron/ cannot look at without GPUs: a whole GPTModel of Megatron-Core over two of them (tensor
parallelism 2 with sequence parallelism, NCCL), its output layer and loss at a server, against Megatron's own. For a
machine with two NVIDIA GPUs and megatron-core importable:

    LOSSD_BINARY=build/bin/lossd torchrun --nproc-per-node 2 client/python/tests/megatron_check.py

The server runs on the first GPU (--device cuda:0). --backend gloo --device cpu tries the same on a CPU, which takes
small sizes: --layers 1 --hidden 64 --vocab 512 --length 32. Prints one line for each check, and times and memory in the
end. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

import lossd  # noqa: E402


class WithoutCuda(torch.overrides.TorchFunctionMode):
    """What Megatron asks of CUDA by name, the CPU does."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if function is torch.Tensor.cuda:
            return given[0]
        if function is torch.Tensor.type and len(given) == 1 and not named:
            return function(*given).replace("torch.", "torch.cuda.")
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*given, **named)


def prepare(given: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import torch_norm

    # PyTorch's LayerNorm would do for sequence parallelism, too, but is refused for it; Apex and Transformer Engine,
    # which have another, are not needed here.
    def layer_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = torch.nn.LayerNorm(hidden_size, eps, device=given.tensors, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = layer_norm
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    if given.tensors.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    return WithoutCuda()


def model_of(given: argparse.Namespace, dtype: torch.dtype, **config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    made = TransformerConfig(
        num_layers=given.layers,
        hidden_size=given.hidden,
        num_attention_heads=max(2, given.hidden // 128),
        use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **config,
    )
    spec = get_gpt_layer_local_spec()
    mtp = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False) if made.mtp_num_layers else None
    model = GPTModel(made, spec, given.vocab, given.length, mtp_block_spec=mtp, position_embedding_type="rope")
    model.to(given.tensors)
    return model


def batch(given: argparse.Namespace, step: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(given.vocab, (given.samples, given.length + 1), generator=random)
    made = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(given.length)[None].expand(given.samples, -1),
        "attention_mask": torch.triu(torch.ones(given.length, given.length, dtype=torch.bool), 1)[None, None],
        "loss_mask": (torch.rand(given.samples, given.length, generator=random) > 0.2).float(),
    }
    return {name: one.to(given.tensors) for name, one in made.items()}


def objective(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def distance(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / max(float(wanted.norm()), 1e-30))


def replaced(model: Any, given: argparse.Namespace, **options: Any) -> Any:
    from lossd.megatron import replace_output_layer

    options = options if options.get("own_weight") else {"optimizer": lossd.AdamW(weight_decay=0.01), **options}
    return replace_output_layer(model, lossd.connect(given.target), "check", **options)


def finish(layer: Any) -> None:
    dist.barrier()
    layer.head.close()
    dist.barrier()
    if dist.get_rank() == 0:
        layer.head.head.client.delete_head(layer.head.name, discard_gradient=True)
    dist.barrier()


def same_gradients(given: argparse.Namespace, dtype: torch.dtype, depths: int, own: bool) -> str:
    """Errors of the losses, of everything in the trunk, and of the output layer's weight."""
    local, remote = (model_of(given, dtype, mtp_num_layers=depths or None) for _ in range(2))
    layer = replaced(remote, given, **({"own_weight": True} if own else {}))
    one = batch(given)
    losses = []
    for model in (local, remote):
        losses.append(model(**one))
        objective(losses[-1], one["loss_mask"]).backward()
    errors = {"losses": distance(losses[1], losses[0])}
    wanted = {name: parameter.grad for name, parameter in local.named_parameters() if parameter.grad is not None}
    rows = wanted.pop("output_layer.weight")
    found = {name: parameter.grad for name, parameter in remote.named_parameters() if parameter.grad is not None}
    if own:
        mine = found.pop("output_layer.weight")
    else:
        # Each rank's own rows, of what the first one gets.
        whole = torch.empty(given.vocab, given.hidden, device=given.tensors)
        layer.head.flush(whole if dist.get_rank() == 0 else None)
        dist.broadcast(whole, 0)
        mine = whole[layer.first_row : layer.first_row + layer.rows_per_rank]
    errors["dW"] = distance(mine, rows)
    assert found.keys() == wanted.keys(), "other parameters have gradients"
    both = [torch.cat([one[name].double().flatten() for name in sorted(wanted)]) for one in (found, wanted)]
    errors["trunk"] = distance(both[0], both[1])
    finish(layer)
    worst = torch.tensor([errors[name] for name in ("losses", "trunk", "dW")], device=given.tensors)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    limit = given.limit_16 if dtype is torch.bfloat16 or given.device != "cpu" else given.limit_32
    said = ", ".join(
        f"{name} {value:.1e}" for name, value in zip(("losses", "trunk", "dW"), worst.tolist(), strict=True)
    )
    assert float(worst.max()) <= limit, f"relative errors: {said}; want at most {limit:.0e}"
    return f"relative errors: {said}"


class Trainer:
    def __init__(self, model: Any, layer: Any, given: argparse.Namespace, dtype: torch.dtype) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from lossd.megatron import OptimizerWithHead

        inner = Float16Module(model.config, model) if dtype is torch.bfloat16 else model
        self.model = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), inner
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=0.0,
            weight_decay=0.01,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])
        if layer is not None and layer.own is None:
            self.optimizer = OptimizerWithHead(self.optimizer, layer)

    def step(self, one: dict[str, Tensor]) -> tuple[float, float]:
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = objective(self.model(**one), one["loss_mask"])
        loss.backward()
        finalize_model_grads([self.model])
        taken, norm, _ = self.optimizer.step()
        assert taken, "a step was skipped"
        return float(loss), float(norm)


def same_course(given: argparse.Namespace, dtype: torch.dtype, own: bool) -> str:
    """A few steps with Megatron's DistributedDataParallel and its distributed optimizer."""
    courses = []
    for remote in (False, True):
        model = model_of(given, dtype)
        layer = replaced(model, given, **({"own_weight": True} if own else {})) if remote else None
        trainer = Trainer(model, layer, given, dtype)
        courses.append([trainer.step(batch(given, step)) for step in range(given.steps)])
        if layer is not None:
            finish(layer)
        del model, trainer
    wanted, found = (torch.tensor(course, dtype=torch.float64) for course in courses)
    difference = float(((found - wanted) / wanted).abs().max())
    losses = [f"{loss:.4f}" for loss, _ in courses[1]]
    assert difference <= given.limit_course, f"losses and norms differ by {difference:.1e}"
    return f"losses {losses[0]} to {losses[-1]} in {given.steps} steps; they and norms differ by {difference:.1e}"


def figures(given: argparse.Namespace, dtype: torch.dtype) -> str:
    """Time of a step, and the trainer's memory at its peak."""
    said = []
    for name in ("local", "remote"):
        if given.tensors.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = model_of(given, dtype)
        layer = replaced(model, given) if name == "remote" else None
        trainer = Trainer(model, layer, given, dtype)
        one, times = batch(given), []
        for _ in range(given.steps + 3):
            dist.barrier()
            began = time.perf_counter()
            trainer.step(one)
            times.append(time.perf_counter() - began)
        times = sorted(times[3:])
        peak = torch.cuda.max_memory_allocated() / 2**30 if given.tensors.type == "cuda" else float("nan")
        said.append(f"{name} {1000 * times[len(times) // 2]:.1f} ms a step, {peak:.2f} GiB at the peak")
        if layer is not None:
            finish(layer)
        del model, trainer
    return "; ".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--device", default="cuda:0", help="the server's")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit_32", type=float, default=2e-6, help="relative error of fp32 from a server's CPU")
    parser.add_argument("--limit_16", type=float, default=2e-2, help="the same of bf16, or from a server's GPU")
    parser.add_argument("--limit_course", type=float, default=5e-2)
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    if given.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    given.tensors = (
        torch.device("cuda", torch.cuda.current_device()) if given.backend == "nccl" else torch.device("cpu")
    )
    dist.init_process_group(given.backend, timeout=datetime.timedelta(minutes=5))
    server = lossd.launch(given.device) if rank == 0 else None
    box = [server.target if server is not None else None]
    dist.broadcast_object_list(box, src=0)
    given.target = box[0]
    fp32, bf16 = torch.float32, torch.bfloat16
    checks: list[tuple[str, Callable[[], str]]] = [
        ("gradients, fp32", lambda: same_gradients(given, fp32, 0, False)),
        ("gradients, bf16", lambda: same_gradients(given, bf16, 0, False)),
        ("gradients, bf16, own weight", lambda: same_gradients(given, bf16, 0, True)),
        ("gradients, fp32, two further tokens", lambda: same_gradients(given, fp32, 2, False)),
        ("training, bf16", lambda: same_course(given, bf16, False)),
        ("training, bf16, own weight", lambda: same_course(given, bf16, True)),
        ("training, fp32", lambda: same_course(given, fp32, False)),
        ("figures, bf16", lambda: figures(given, bf16)),
    ]
    failed = 0
    with prepare(given):
        for name, check in checks:
            try:
                said = check()
            except Exception as error:  # noqa: BLE001  (a rank that fails alone leaves the other in a collective)
                said, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
            if rank == 0 or said.startswith("FAILED"):
                print(f"rank {rank}: {name:36} {said}", flush=True)
            if (
                not isinstance(said, str)
                or said.startswith("FAILED")
                and "relative" not in said
                and "differ" not in said
            ):
                break  # the ranks may not be at the same place any more
    print(f"rank {rank}: {failed} failed", flush=True)
    if server is not None:
        server.stop()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
