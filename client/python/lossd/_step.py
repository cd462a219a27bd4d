"""The call behind Head.step."""

from __future__ import annotations

import ctypes as c
import math

import lossd._structs as s
from lossd._arguments import integer, optional_number, real
from lossd._core import HeadCore
from lossd._library import library, marks_array
from lossd.results import StepResult


def options_of(
    lr: float,
    gradient_scale: float,
    skip_non_finite: bool,
    weight_decay: float | None,
    momentum: float | None,
    betas: tuple[float, float] | None,
    generation: int | None,
) -> s.StepOptions:
    """Head.step's arguments for the library. FloatingPointError for a gradient_scale that is not finite, unless such a
    step is to be skipped."""
    options = library().make(s.StepOptions)
    options.learning_rate = lr
    options.gradient_scale = real(gradient_scale, "gradient_scale")
    if not math.isfinite(options.gradient_scale) and not skip_non_finite:
        raise FloatingPointError(f"gradient_scale is {options.gradient_scale}: nothing was stepped")
    options.skip_non_finite = bool(skip_non_finite)
    options.weight_decay = optional_number(weight_decay, "weight_decay")
    options.momentum = optional_number(momentum, "momentum")
    beta1, beta2 = (None, None) if betas is None else betas
    options.beta1, options.beta2 = optional_number(beta1, "betas[0]"), optional_number(beta2, "betas[1]")
    if generation is not None:
        options.has_generation, options.generation = 1, integer(generation, "generation", most=(1 << 64) - 1)
    return options


class StepCall:
    """One call of the library, and whether a signal kept its answer from the caller."""

    def __init__(self, core: HeadCore, options: s.StepOptions) -> None:
        self._core = core
        self._options = options
        self._result = library().make(s.StepResult)
        self.is_untold = False
        """The step was taken, but the handler of a signal raised something, so that nobody got the result."""

    def run(self, marks: list[str]) -> None:
        with self._core.handle as head:
            library().call(
                "lossd_head_apply_step",
                head,
                c.byref(self._options),
                *marks_array(marks),
                c.byref(self._result),
                interrupted=self._note_interrupted,
            )

    def _note_interrupted(self, done: bool) -> None:
        self.is_untold = done
        if done:
            self._core.window.keep_step(bytes(self._options), self.result())

    def result(self) -> StepResult:
        of = self._result
        return StepResult(
            of.generation,
            of.weight_version,
            of.step,
            bool(of.skipped),
            of.norm,
            of.bias_norm,
            of.non_finite,
            of.window_tokens,
        )


def untold(core: HeadCore, options: s.StepOptions) -> StepResult | None:
    """The step that such a call is about, if a signal kept its answer from the caller and nothing came after it."""
    kept = core.window.take_step(bytes(options))
    if kept is None:
        return None
    info = core.info()
    return kept if info.generation == kept.generation and info.window_tokens == 0 else None
