"""The last stage of Megatron-Core's GPTModel at a lossd server.

    layer = lossd.megatron.replace_output_layer(model, client, "lm_head", optimizer=lossd.AdamW())
    ...
    optimizer = lossd.megatron.OptimizerWithHead(optimizer, layer)     # steps the head with the model

docs/megatron.md has the rest.
"""

from lossd import torch as _torch  # noqa: F401, first: it says so if PyTorch is missing

try:
    import megatron.core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name in ("megatron", "megatron.core"):
        raise ModuleNotFoundError(
            "lossd.megatron needs Megatron-Core: pip install megatron-core", name=error.name
        ) from None
    raise

from lossd.megatron._layer import RemoteOutputLayer
from lossd.megatron._model import replace_output_layer
from lossd.megatron._optimizer import OptimizerWithHead

__all__ = ["OptimizerWithHead", "RemoteOutputLayer", "replace_output_layer"]
