"""The parameter that stands for a head where code of trainers looks at parameters and their gradients."""

from __future__ import annotations

import copy
import math
import re
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map

from lossd.torch._moved import KEEP_OUT, MovedGradientError, Taken, has_storage, proxies

if TYPE_CHECKING:
    from lossd.torch._window import HeadWindow
    from lossd.torch.head import RemoteHead

_GRAD: Any = torch._C.TensorBase.grad  # what GradientProxy.grad hides
# Names of functions that change a tensor.
_CHANGES = re.compile(r"(?!__).*_|__(?!int_|index_|invert_)(i[a-z]+|setitem)__")
_FACTORS = re.compile(r".*(mul|div|divide|multiply|zero|unscale|copy|requires_grad|detach)_|__(imul|itruediv|idiv)__")
_DATA: Any = torch._C.TensorBase.data
_COPIES = {"__deepcopy__", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "to", "type"}
# What logs make of a gradient, and hooks do not answer.
_STATISTICS = re.compile(
    r"abs|pow|square|sqrt|sign|sgn|log|log2|log10|log1p|sum|nansum|mean|nanmean|median|std|var|amax|amin|logsumexp|"
    r"(_foreach_|linalg_|linalg_vector_)?norm|\w+_like"
)
_NOT_TO_NORM = (
    "{} cannot be done to a head's gradient, which is at the server, and whose norm .grad is: it can be multiplied in "
    "place with a factor (clip_grad_norm_), and that is all. For clip_grad_value_, noise and the like keep gradient "
    "and weight here, with lossd.torch.LocalWeight"
)


class GradientNorm(torch.Tensor):
    """What a GradientProxy has as `.grad`. It may be multiplied in place. What would change single elements of a
    gradient, such as clip_grad_value_ or noise, raises RuntimeError: done to the norm it would scale all of them.
    Copies of it are noticed (GradientProxy.taken)."""

    proxy: weakref.ref[GradientProxy]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__set__" and getattr(function, "__self__", None) is _DATA and isinstance(args[0], cls):
            raise RuntimeError(_NOT_TO_NORM.format("setting .data"))
        if _CHANGES.fullmatch(name) and not _FACTORS.fullmatch(name) and _first_has_norm(args):
            raise RuntimeError(_NOT_TO_NORM.format(name.strip("_")))
        with torch._C.DisableTorchFunctionSubclass():
            # DTensors, as clip_grad_norm_ may multiply with, take no other subclass beside them.
            plain_args, plain_kwargs = tree_map(_plain, (args, kwargs or {}))
            result = function(*plain_args, **plain_kwargs)
            if not args or not isinstance(args[0], cls):
                _notice_copy(name, result, args)
                return result
            if type(result) is not torch.Tensor:
                return result
            if result is plain_args[0]:
                return args[0]
            if result.data_ptr() != args[0].data_ptr():
                _notice_copy(name, result, args)
                return result
            alias = result.as_subclass(cls)  # .data, detach() and views
            alias.proxy = args[0].proxy
            return alias


def _is_statistic(name: str, args: tuple[Any, ...]) -> bool:
    """Whether nobody steps by the result; g * g is one, too."""
    squares = name == "mul" and len(args) == 2 and type(args[0]) is type(args[1])
    return squares or _STATISTICS.fullmatch(name) is not None


def _notice_copy(name: str, result: Any, args: Any) -> None:
    """Marks heads whose gradient was copied into `result`, or into the first of `args`. A mere number is no copy."""
    changes = _CHANGES.fullmatch(name) is not None
    if _is_statistic(name, args) or (changes and _first_has_norm(args)):  # multiplied in place, as clipping does
        return
    copies = (result, args[:1]) if changes else result
    found = [one for one in tree_leaves(copies) if isinstance(one, torch.Tensor) and one.dim() > 0]
    found = [one for one in found if one.is_floating_point() and has_storage(one)]
    for one in tree_leaves(args) if found else ():
        proxy = one.proxy() if isinstance(one, GradientNorm) else None
        if proxy is not None:
            proxy.taken.copied(f"copied by {name.strip('_')}", found)


# clip_grad_norm_ multiplies a list of gradients at once, as it must if some are DTensors, only if it knows all classes.
_foreach_utils._foreach_supported_types.append(GradientNorm)  # noqa: SLF001  (there is no public way)


class GradientMark(torch.Tensor):
    """What a backward pass gives to a head's parameter, [1, 1]: 0, or NaN where a gradient is not finite. Hooks of the
    parameter and torch.autograd.grad get it. It may be looked at; what would scale or step it raises RuntimeError."""

    head_name: str

    @classmethod
    def of(cls, value: float, head_name: str, device: torch.device) -> GradientMark:
        made: GradientMark = torch.full((1, 1), value, dtype=torch.float32, device=device).as_subclass(cls)
        made.head_name = head_name
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        mark = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        with torch._C.DisableTorchFunctionSubclass():
            plain = lambda one: one.as_subclass(torch.Tensor) if isinstance(one, cls) else one  # noqa: E731
            plain_args, plain_kwargs = tree_map(plain, (args, kwargs or {}))
            changes = _CHANGES.fullmatch(name) is not None and name != "requires_grad_"
            result: Any = None if changes else function(*plain_args, **plain_kwargs)
            made = isinstance(result, torch.Tensor) and result.shape == (1, 1) and result.is_floating_point()
            if made and (name in _COPIES or result.data_ptr() == mark.data_ptr()):
                copy = result.as_subclass(cls)
                copy.head_name = mark.head_name
                return copy
        if _is_statistic(name, args) or not (changes or made or name.startswith("_foreach_")):
            return result
        raise RuntimeError(
            f"{name.strip('_')} cannot be done to what hooks and torch.autograd.grad get of head '{mark.head_name}': "
            "the gradient is at the server, where the backward pass has added it. Call loss.backward(), scale the "
            "loss, or .grad of the head's parameter in place, and step by an optimizer of torch.optim or "
            "head.step(lr). For other things to be done to a gradient keep it here, with lossd.torch.LocalWeight"
        )


class _UnknownGradient(torch.Tensor):
    """The `.grad` of a head that ranks share, before they have asked for its norm together: there is one, which may be
    set to None, as zero_grad() does on every rank. Whoever wants more gets an error."""

    head_name: str

    @classmethod
    def of(cls, proxy: GradientProxy) -> _UnknownGradient:
        made: _UnknownGradient = torch.zeros(1, 1, dtype=torch.float32, device=proxy.device).as_subclass(cls)
        made.head_name = proxy.head.name
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(one.head_name for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        raise RuntimeError(
            f"the gradient of head '{name}' is that of all ranks: clip it with lossd.torch.clip_grad_norm_, or have "
            "every rank call head.refresh_gradient() behind its last backward, before it looks at .grad of the head's "
            "parameter. To drop it, call head.zero_grad() on every rank"
        )


def _plain(one: Any) -> Any:
    """The same memory, as a tensor like any other."""
    return one.as_subclass(torch.Tensor) if isinstance(one, GradientNorm) else one


def _first_has_norm(args: tuple[Any, ...]) -> bool:
    """Whether a GradientNorm is, or is among, what is changed."""
    first = args[0] if args else None
    return any(isinstance(one, GradientNorm) for one in (first if isinstance(first, (tuple, list)) else [first]))


def _clears_gradients(caller: FrameType) -> bool:
    """Whether it is zero_grad() of a module or an optimizer that sets `.grad` to None."""
    return caller.f_code.co_name == "zero_grad"


class GradientProxy(torch.nn.Parameter):
    """[1, 1], fp32: the one parameter of a RemoteHead. Its `.grad` is the Frobenius norm of the gradient that waits at
    the server (of dW and db together), and NaN if an element of that is not finite.

    - An optimizer of PyTorch that holds it steps the head (lossd.torch.RemoteHead).
    - It has two dimensions, as the weights have, for those who tell by them what is decayed.
    - A factor that multiplies `.grad` in place multiplies the head's next step or flush, too: GradScaler.unscale_,
      torch.nn.utils.clip_grad_norm_ (whose 2-norm over parameters and proxies is the global one), or `grad.mul_`. The
      factor is `.grad` over what it was when it was read; it ends with the window. Anything else that is done to it in
      place, such as clip_grad_value_ does, raises (GradientNorm).
    - `.grad = None`, which zero_grad() of modules and optimizers does, drops what waits at the server.
    - `.grad` is asked for (GradientStats) when it is first looked at, and again once more was added; None while nothing
      waits. Of a head with a process group it is not asked for by itself, as that is collective: every rank calls
      RemoteHead.refresh_gradient() behind its last backward.
    - Losses depend on it, so that they are differentiable when hidden states are not, and so that
      DistributedDataParallel sees it used."""

    window: HeadWindow
    head: RemoteHead
    steps: int
    """How many the head has taken, as of the last one by an optimizer of PyTorch."""
    taken: Taken
    held: bool
    """Whether an optimizer of this process has the parameter, and steps."""

    def __new__(cls, head: Any, window: Any = None, device: torch.device | None = None, **_: Any) -> GradientProxy:
        if isinstance(head, torch.Tensor):  # as accelerate makes parameters, of their class
            raise MovedGradientError(
                "a parameter cannot be made in the place of a head's, whose weights are at a server, as offloading "
                f"and sharding models (accelerate's cpu_offload and dispatch_model) do. {KEEP_OUT}"
            )
        value = torch.zeros(1, 1, dtype=torch.float32, device=device or "cpu")
        proxy: GradientProxy = torch.Tensor._make_subclass(cls, value, True)
        proxy.head = head
        proxy.window = window
        proxy.steps = 0
        proxy.taken = Taken()
        proxy.held = False
        proxy.forget()
        proxies[id(proxy)] = proxy
        return proxy

    def __init__(self, *_: Any) -> None:
        pass  # __new__ has done it, as torch.nn.Parameter's does

    def forget(self) -> None:
        """Begins anew: of another window, or of one that goes on."""
        self._norm: torch.Tensor | None = None
        self._read = 0.0
        self._seen: object = None

    def put(self, norm: float, seen: object) -> torch.Tensor:
        """`norm` as read while the window's contributions were `seen`; NaN if an element is not finite. Returns what is
        `.grad` now."""
        with torch.inference_mode(False):
            made = torch.full((1, 1), norm, dtype=torch.float32, device=self.data.device).as_subclass(GradientNorm)
        made.proxy = weakref.ref(self)
        self._norm = made
        self._read = float(self._norm)
        self._seen = seen
        return self._norm

    @property
    def marker(self) -> torch.Tensor | None:
        """What autograd accumulated: [1, 1], 0, or NaN after a loss whose gradient was not finite. None before a
        backward."""
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @marker.setter
    def marker(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @property
    def factor(self) -> float:
        """What the gradient is multiplied with so far. 1 unless somebody changed `.grad`."""
        if self._norm is None:
            return 1.0
        now = float(self._norm)
        if not math.isfinite(self._read):  # it cannot be told from the quotient; the step looks at the elements itself
            return 1.0
        if not math.isfinite(now):  # a norm that is not finite was multiplied with; nothing is left of a gradient
            return math.nan
        if now == self._read or self._read == 0.0:
            return 1.0
        return now / self._read

    @property
    def zeroed(self) -> bool:
        """Whether `.grad` was set to 0 in place, as zero_grad(set_to_none=False) does."""
        return self._norm is not None and self._read != 0.0 and float(self._norm) == 0.0

    @property
    def grad(self) -> torch.Tensor | None:
        if TracingContext.try_get() is not None:  # torch.compile looks at each parameter's
            return None
        if self._norm is None or self._seen != self.window.contributions():
            if self._is_of_all_ranks():
                return _UnknownGradient.of(self)
            self._refresh()
        return self._norm

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        # `.grad *= factor` has multiplied it; .grad.detach() is the same memory.
        if isinstance(value, GradientNorm) and self._norm is not None and value.data_ptr() == self._norm.data_ptr():
            return
        if value is None:
            if not self.head.frozen:
                read = self._norm is not None and self.window.dirty
                moved = read and not _clears_gradients(sys._getframe(1))  # noqa: SLF001  (there is no public way)
                self.window.drop()
                if moved:
                    self.taken.dropped()
        elif self.taken.how and not self.window.dirty and bool(value.any()):
            self.taken = Taken()
            raise MovedGradientError(
                f"the gradient of head '{self.head.name}' is at the server, and was dropped there when .grad was set "
                "to None: leave .grad alone between backward and step, and keep the head's parameter from code that "
                "offloads gradients"
            )
        elif self.window.dirty or bool(value.any()):
            raise ValueError("a head's gradient is at the server: multiply .grad in place, or set it to None")

    def _is_of_all_ranks(self) -> bool:
        """Whether there is a gradient whose norm ranks have to ask for together."""
        waits = self.window.dirty or self.marker is not None  # one or the other on every rank that had a backward pass
        return self.window.group is not None and waits and not self.head.frozen

    def _refresh(self) -> None:
        window = self.window
        if self.head.frozen or (window.group is None and not window.dirty and self.marker is None):
            self.forget()
        elif window.group is None:
            self.head.refresh_gradient()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientProxy:
        return copy.deepcopy(self.head, memo).proxy

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        raise TypeError("a head's parameter cannot be pickled: save state_dict(), and the head's checkpoint")
