"""What the modules behind Head and Session share of one head."""

from __future__ import annotations

from dataclasses import dataclass

from lossd._handles import Handle
from lossd._library import library
from lossd._window import Window, Windows
from lossd.results import HeadConfig, HeadInfo, from_json


@dataclass(frozen=True)
class HeadCore:
    """Thread-safe. `window` is that of all cores of this head which one client makes."""

    handle: Handle
    config: HeadConfig
    window: Window

    @classmethod
    def of(cls, pointer: int | None, windows: Windows) -> HeadCore:
        """Takes over a lossd_head*."""
        handle = Handle(pointer, "lossd_head_free", "this head")
        config = _info(handle).config
        return cls(handle, config, windows.of(config.name))

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weights and of their gradient: [V, H]."""
        return self.vocab_size, self.hidden_size

    def info(self) -> HeadInfo:
        """What the server knows of it now."""
        return _info(self.handle)


def _info(handle: Handle) -> HeadInfo:
    with handle as head:
        return from_json(HeadInfo, library().json("lossd_head_info", head))
