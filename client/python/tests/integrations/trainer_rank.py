"""One of the ranks that test_trainer_ranks.py starts: data-parallel training with Trainer, accelerate and TRL."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import GradientState
from models import batch, build
from torch.nn.parallel import DistributedDataParallel

import lossd
from lossd.transformers import RemoteHeadTrainer, patch, patched_head, unpatch

RANKS, STEPS, ROWS = 2, 3, 24
LEARNING_RATE, MAX_NORM = 0.05, 0.5


class Rows(torch.utils.data.Dataset):
    """Rows with different numbers of labels, so that ranks have different ones."""

    def __init__(self) -> None:
        self._tokens = 3 + (7 * torch.arange(ROWS)[:, None] + 5 * torch.arange(10)) % 58

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        labels = self._tokens[row].clone()
        labels[: row % 7] = -100
        return {"input_ids": self._tokens[row], "labels": labels}


def arguments(**more: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=STEPS,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=LEARNING_RATE, optim="sgd",
        weight_decay=0.1, seed=4, save_strategy="no", **more,
    )  # fmt: skip


def by_trainer(model: torch.nn.Module, kind: type, **more: Any) -> list[dict[str, float]]:
    trainer = kind(model=model, args=arguments(**more), train_dataset=Rows(), eval_dataset=Rows())
    assert trainer.accelerator.num_processes == RANKS
    trainer.train()
    log = [{key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry]
    return [*log, {"loss": trainer.evaluate()["eval_loss"]}]


class OutOfMemory(transformers.Trainer):
    """Once, with half of a step's gradient at the server."""

    calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return loss


class Interrupted(transformers.Trainer):
    """Its first train() ends with half of a step's gradient at the server."""

    class _Stop(transformers.TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    def train(self, *args: Any, **kwargs: Any) -> Any:
        stop = self._Stop()
        self.add_callback(stop)
        with contextlib.suppress(KeyboardInterrupt):
            super().train()
        self.remove_callback(stop)
        return super().train(*args, **kwargs)


def zeroed(model: torch.nn.Module, rank: int, wrap: Callable[..., Any]) -> tuple[int, str]:
    """Tokens in the window after zero_grad() of a part of a step, to which the second rank has added none; and what was
    answered before to a rank that asked for the gradient's norm alone."""
    wrapped, head, inputs = wrap(model.train()), patched_head(model), batch()
    inputs["labels"][:] = -100 if rank else 7
    GradientState()._set_sync_gradients(False)
    model(**inputs).loss.backward()
    GradientState()._set_sync_gradients(True)
    message = message_of(lambda: head.proxy.grad.norm())
    wrapped.zero_grad()
    dist.barrier()
    return head.head.info().window_tokens, message


def by_accelerate(model: torch.nn.Module) -> list[dict[str, float]]:
    """A loop as accelerate's documentation has them."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    log = []
    model.train()
    for rows in loader:
        with accelerator.accumulate(model):
            loss = model(**rows).loss
            accelerator.backward(loss)
            entry = {"loss": accelerator.reduce(loss.detach(), "mean").item()}
            if accelerator.sync_gradients:
                entry["grad_norm"] = float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
        log.append(entry)
    return log


def by_uneven_ranks(model: torch.nn.Module, rank: int) -> list[dict[str, float]]:
    """A loop of DistributedDataParallel alone, whose ranks come to each step by one and by three micro-batches."""
    ddp = DistributedDataParallel(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    count = 1 + 2 * rank
    log = []
    for step in range(STEPS):
        losses = []
        for number in range(count):
            with ddp.no_sync() if number < count - 1 else contextlib.nullcontext():
                losses.append(ddp(**batch(seed=100 * rank + 10 * step + number)).loss / count)
                losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        log.append({"loss": float(sum(losses)), "grad_norm": float(norm)})
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*log, {"loss": float(ddp(**batch()).loss)}]


def by_sampling_ranks(model: torch.nn.Module, rank: int) -> list[dict[str, Any]]:
    """A loop whose ranks call the model more or less often between steps, one of them alone to begin with."""
    log = []

    def generate(tokens: int) -> list[int]:
        with torch.no_grad():
            prompt = batch()["input_ids"][:1, :4]
            return model.eval().generate(prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None)[0].tolist()

    generate(2 + 2 * rank)
    ddp = torch.nn.parallel.DistributedDataParallel(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ddp(**batch(seed=10 * step + rank)).loss
        loss.backward()
        optimizer.step()
        texts = [generate(6 + step)] if rank == 0 else []
        dist.barrier()
        texts.append(generate(3 + 4 * rank))
        log.append({"loss": loss.item(), "texts": texts})
        model.train()
    return log


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001  (which one, the test looks at)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run(rank: int, group: dist.ProcessGroup, target: str, name: str) -> dict[str, Any]:
    """What every case logged; of the remote head and of the local one."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found: dict[str, Any] = {}
    with lossd.connect(target) as client:

        def patched(case: str, **options: Any) -> tuple[torch.nn.Module, Any]:
            model = build("llama")
            settings = {"group": dist.group.WORLD, "average": True, "optimizer": lossd.SGD(), **options}
            return model, patch(model, client=client, name=name + case.replace(" ", "-"), **settings)

        for case, more in {
            "clipped": {"max_grad_norm": MAX_NORM},
            "unclipped": {"max_grad_norm": 0.0},
            "means of means": {"max_grad_norm": MAX_NORM, "average_tokens_across_devices": False},
            "smoothed": {"max_grad_norm": MAX_NORM, "label_smoothing_factor": 0.2},
            "frozen": {"max_grad_norm": MAX_NORM},
            "out of memory": {"max_grad_norm": MAX_NORM, "auto_find_batch_size": True},
            "interrupted": {"max_grad_norm": MAX_NORM},
        }.items():
            model, head = patched(case)
            local = build("llama")
            if case == "frozen":  # later, as PEFT does it
                model.lm_head.requires_grad_(False)
                local.lm_head.requires_grad_(False)
            kinds = {"out of memory": OutOfMemory, "interrupted": Interrupted}
            local_kind = kinds.get(case, transformers.Trainer)
            kind = RemoteHeadTrainer if case == "smoothed" else local_kind
            remote_log = by_trainer(model, kind, **more)
            found[case] = {"remote": remote_log, "local": by_trainer(local, local_kind, **more)}
            found[case]["steps"] = head.head.info().optimizer_steps
            unpatch(model)
            difference = (model.lm_head.weight - local.lm_head.weight).abs().max()
            found[case]["difference"] = float(difference / local.lm_head.weight.abs().max())

        model = build("llama-tied")
        head = patch(model, client=client, name=name + "tied", group=dist.group.WORLD)
        found["tied"] = {
            "remote": by_trainer(model, transformers.Trainer, max_grad_norm=MAX_NORM),
            "local": by_trainer(build("llama-tied"), transformers.Trainer, max_grad_norm=MAX_NORM),
        }
        for case, kind in {"uneven": "llama", "uneven, tied": "llama-tied"}.items():
            shared = {"average": True, "optimizer": lossd.SGD()} if kind == "llama" else {}
            model = build(kind)
            patch(model, client=client, name=name + case.replace(", ", "-"), group=dist.group.WORLD, **shared)
            found[case] = {"remote": by_uneven_ranks(model, rank), "local": by_uneven_ranks(build(kind), rank)}

        tied_logs = {}
        for kind in ("remote", "local"):
            model = build("llama-tied", seed=3 + rank)  # DistributedDataParallel makes them the same
            if kind == "remote":
                patch(model, client=client, name=name + "sampling", group=dist.group.WORLD)
            tied_logs[kind] = by_sampling_ranks(model, rank)
        found["tied, sampling"] = tied_logs

        model, head = patched("accelerate")
        found["accelerate"] = {"remote": by_accelerate(model), "local": by_accelerate(build("llama"))}
        found["accelerate"]["steps"] = head.head.info().optimizer_steps

        model, _ = patched("zeroed")
        found["zeroed"] = [zeroed(model, rank, wrap) for wrap in (lambda model: model, DistributedDataParallel)]

        model, _ = patched("copied")
        copied = copy.deepcopy(model)  # as of a reference
        with torch.no_grad():
            found["loss"] = build("llama")(**batch()).loss.item()
            found["copy"] = patched_head(copied).name, copied(**batch()).loss.item()

        model = build("llama")
        if rank == 0:
            patch(model, client=client, name=name + "alone", optimizer=lossd.SGD())
        dist.barrier()
        if rank == 1:
            patch(model, client.head(name + "alone"), upload=False)
        found["no group"] = message_of(lambda: by_trainer(model, transformers.Trainer))
        model = build("llama-tied")
        patch(model, client=client, name=name + "averaged", group=dist.group.WORLD, average=True)
        found["tied, average"] = message_of(lambda: by_trainer(model, transformers.Trainer))
        dist.barrier()
    return found
