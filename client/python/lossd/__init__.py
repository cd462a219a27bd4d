"""Client of lossd: the last stage of language-model training as a service.

    import lossd

    with lossd.launch() as server, server.client() as client:      # or lossd.connect("host:50051")
        head = client.create_head("lm_head", vocab_size, hidden_size)
        head.write_weights(weights)                                 # [V, H]
        with head.open_session() as session:
            result = session.compute(hidden, labels)                # [..., H], [...] -> .losses, .dx
        gradient = head.flush().gradient                            # dW [V, H]

lossd.torch is for PyTorch, lossd.aio for asyncio. Handles must not be used in a process that was forked from the one
that made them.
"""

from lossd._batch import Distillation, TargetLists
from lossd._library import library as _load
from lossd.averages import MovingAverage
from lossd.client import Client, Tls, connect
from lossd.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    LaunchError,
    LibraryError,
    LossdError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
    VersionMismatchError,
    VersionMismatchWarning,
    WindowLostError,
)
from lossd.head import Head
from lossd.optimizers import SGD, Adam, AdamW
from lossd.regions import Region
from lossd.results import (
    BatchResult,
    CheckpointInfo,
    DeletedCheckpoint,
    FlushResult,
    GradientStats,
    HeadConfig,
    HeadInfo,
    LoadedWeights,
    SavedCheckpoint,
    ServerMemory,
    ServerStatus,
    StepResult,
    TopLogits,
    Traffic,
)
from lossd.server import Server, launch
from lossd.session import Session
from lossd.weights import WeightWrite

__version__ = "0.1.0"


def library_version() -> str:
    """The version of the library that is loaded."""
    return _load().version


__all__ = [
    "AbortedError",
    "Adam",
    "AdamW",
    "AlreadyExistsError",
    "BatchResult",
    "CancelledError",
    "CheckpointInfo",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "DeletedCheckpoint",
    "Distillation",
    "FailedPreconditionError",
    "FlushResult",
    "GradientStats",
    "Head",
    "HeadConfig",
    "HeadInfo",
    "InternalError",
    "InvalidArgumentError",
    "LaunchError",
    "LibraryError",
    "LoadedWeights",
    "LossdError",
    "MovingAverage",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "Region",
    "ResourceExhaustedError",
    "SGD",
    "SavedCheckpoint",
    "Server",
    "ServerMemory",
    "ServerStatus",
    "Session",
    "StepResult",
    "TargetLists",
    "Tls",
    "TopLogits",
    "Traffic",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "VersionMismatchError",
    "VersionMismatchWarning",
    "WeightWrite",
    "WindowLostError",
    "connect",
    "launch",
    "library_version",
]
