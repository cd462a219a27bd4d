"""Checks of arguments that are no tensors, and callbacks that may raise."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import lossd._structs as s

ProgressCallback = Callable[[int, int], None]
"""Called with (done, total) bytes from the thread that made the call."""

NAN = math.nan


def choice(value: object, field: str, numbers_of: Mapping[str, int]) -> int:
    if not isinstance(value, str) or value not in numbers_of:
        raise ValueError(f"{field} is {value!r}; want one of {', '.join(map(repr, numbers_of))}")
    return numbers_of[value]


def integer(value: object, field: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{field} is a {type(value).__name__}; want an int")
    number = int(value.__index__())
    if not least <= number <= most:
        raise ValueError(f"{field} is {number}; want {least} to {most}")
    return number


def real(value: Any, field: str) -> float:
    """A float of a number or of a tensor with one element, NaN too."""
    if not isinstance(value, numbers.Real) and not (hasattr(value, "__float__") and not isinstance(value, str)):
        raise TypeError(f"{field} is a {type(value).__name__}; want a number")
    return float(value)


def number(value: Any, field: str) -> float:
    """As real(), but NaN is refused: it means "not set" to the library."""
    result = real(value, field)
    if math.isnan(result):
        raise ValueError(f"{field} is NaN; want a number")
    return result


def optional_number(value: Any, field: str) -> float:
    return NAN if value is None else number(value, field)


class Raised:
    """Keeps what a callback raised until the library's call has returned, for nothing may pass through C."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def progress(self, callback: ProgressCallback | None) -> Any:
        if callback is None:
            return s.Progress()

        def called(_user: object, done: int, total: int) -> None:
            self.run(callback, done, total)

        return s.Progress(called)

    def run(self, callback: Callable[..., Any], *arguments: Any) -> bool:
        """False if the callback, or an earlier one, raised."""
        if self.error is None:
            try:
                callback(*arguments)
            except BaseException as error:  # noqa: BLE001, KeyboardInterrupt too: it is raised again
                self.error = error
        return self.error is None

    def again(self) -> None:
        """Raises what was kept."""
        if self.error is not None:
            raise self.error
