"""lossd for PyTorch.

    import lossd
    from lossd.torch import RemoteHead

    client = lossd.connect("host:50051")
    model.lm_head = RemoteHead.from_linear(client, model.lm_head, "lm_head", optimizer=lossd.AdamW(), grad_scale=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)     # steps the head as well
    model.lm_head(hidden, labels).backward()                       # was: F.cross_entropy(model.lm_head(hidden), labels)
    optimizer.step()

docs/pytorch.md has the loss, docs/trainers.md the rest.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name == "torch":
        raise ModuleNotFoundError("lossd.torch needs PyTorch: pip install 'torch>=2.6'", name="torch") from None
    raise

from lossd.torch._function import linear_cross_entropy, token_log_probs
from lossd.torch._moved import MovedGradientError
from lossd.torch._multi_token import multi_token_cross_entropy
from lossd.torch._stepping import OtherRuleWarning, UnsteppedHeadWarning, UntiedHeadWarning
from lossd.torch._tokens import shift_labels
from lossd.torch._weight import FetchedWeightsWarning
from lossd.torch._window import UndeclaredGradientWarning
from lossd.torch.clip import clip_grad_norm_
from lossd.torch.contracts import LocalWeight, flush_into
from lossd.torch.distributed import gather_marks, global_token_count, read_shard, write_shard
from lossd.torch.head import FrozenCopyWarning, RemoteHead, StaleWeightsWarning
from lossd.torch.optimizer import RemoteOptimizer
from lossd.torch.state import HeadCheckpoint, HeadState

__all__ = [
    "FetchedWeightsWarning",
    "FrozenCopyWarning",
    "HeadCheckpoint",
    "HeadState",
    "LocalWeight",
    "MovedGradientError",
    "OtherRuleWarning",
    "RemoteHead",
    "RemoteOptimizer",
    "StaleWeightsWarning",
    "UndeclaredGradientWarning",
    "UnsteppedHeadWarning",
    "UntiedHeadWarning",
    "clip_grad_norm_",
    "flush_into",
    "gather_marks",
    "global_token_count",
    "linear_cross_entropy",
    "multi_token_cross_entropy",
    "read_shard",
    "shift_labels",
    "token_log_probs",
    "write_shard",
]
