"""lossd for PyTorch.

    import lossd
    from lossd.torch import RemoteHead, linear_cross_entropy

    head = RemoteHead.from_linear(lossd.connect("host:50051"), model.lm_head, "lm_head", optimizer=lossd.AdamW())
    linear_cross_entropy(hidden, labels, head).backward()           # as F.cross_entropy(lm_head(hidden), labels)
    head.step(lr=1e-4)

docs/pytorch.md has the loss, docs/trainers.md the rest.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name == "torch":
        raise ModuleNotFoundError("lossd.torch needs PyTorch: pip install 'torch>=2.6'", name="torch") from None
    raise

from lossd.torch._function import linear_cross_entropy
from lossd.torch._module import RemoteLinearCrossEntropy
from lossd.torch._tokens import shift_labels
from lossd.torch.clip import clip_grad_norm_
from lossd.torch.contracts import LocalWeight, flush_into
from lossd.torch.distributed import gather_marks, global_token_count, read_shard, write_shard
from lossd.torch.head import RemoteHead
from lossd.torch.optimizer import RemoteOptimizer
from lossd.torch.state import attach_state

__all__ = [
    "LocalWeight",
    "RemoteHead",
    "RemoteLinearCrossEntropy",
    "RemoteOptimizer",
    "attach_state",
    "clip_grad_norm_",
    "flush_into",
    "gather_marks",
    "global_token_count",
    "linear_cross_entropy",
    "read_shard",
    "shift_labels",
    "write_shard",
]
