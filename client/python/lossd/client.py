"""A connection to one server, or to replicas."""

from __future__ import annotations

import ctypes as c
import functools
import logging
import os
import threading
import warnings
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import lossd._gone as _gone
import lossd._interrupts as _interrupts
import lossd._structs as s
import lossd._tensors as t
import lossd._trace as _trace
from lossd._arguments import choice, integer, number
from lossd._core import HeadCore
from lossd._handles import Handle, note_connecting
from lossd._library import encoded, library
from lossd._trace import TraceParent
from lossd._window import Windows
from lossd.errors import VersionMismatchError, VersionMismatchWarning
from lossd.head import Head
from lossd.optimizers import Optimizer, struct_of
from lossd.regions import Region
from lossd.results import CheckpointInfo, DeletedCheckpoint, HeadInfo, ServerMemory, ServerStatus, Traffic, from_json

_log = logging.getLogger("lossd")
_SILENT_SECONDS = 3.0  # that connect waits without a word

REGION_KINDS = {"system": s.LOSSD_REGION_SYSTEM, "device": s.LOSSD_REGION_DEVICE}


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files, read again when they change. ca_certificates: who may have signed the server's ("": the
    system's roots); certificate and key: this client's, for servers that ask for one; server_name: what the server's
    certificate must be for ("": the host of the target)."""

    ca_certificates: str | os.PathLike[str] = ""
    certificate: str | os.PathLike[str] = ""
    key: str | os.PathLike[str] = ""
    server_name: str = ""


def connect(
    target: str,
    *,
    tls: Tls | None = None,
    token_file: str | os.PathLike[str] | None = None,
    token_over_plain_text: bool = False,
    call_timeout: float = 30.0,
    reconnect_timeout: float = 60.0,
    transfer_bytes: int = 4 << 20,
    check_version: bool | None = None,
    trace_parent: TraceParent = None,
) -> Client:
    """Connects to "host:port", "dns:///name:port" or "unix:/path"; waits until the server answers. Of replicas several
    with commas between them, "host-a:50051,host-b:50051", or a name with the addresses of all: whichever answers is
    called, and another one when it goes. Sessions are where the replicas say, and go on through any of them.

    token_file: of the token that is shown to a server which asks for one (lossd --tokens), and nothing else; read
    again when it changes. It is not sent in plain text to another machine unless token_over_plain_text says that
    something else encrypts it. call_timeout: seconds without an answer after which a call fails with
    DeadlineExceededError; one that moves tensors, or waits for the server's disks or device, if meanwhile the server
    did not answer a question whether it is there either: one that is only busy answers that. reconnect_timeout:
    seconds that a call goes on trying to reach the server before it fails with UnavailableError.
    transfer_bytes: of one message of weights or gradient rows. check_version: what happens if the server's version is
    not this library's: None warns once a server (VersionMismatchWarning), since what the server lacks is refused call
    by call; True raises VersionMismatchError; False does not ask.
    trace_parent: the trace that calls belong to, which the server names in its log: a W3C traceparent, or what is asked
    for one (or for a pair of traceparent and tracestate, or None) before each call; None: OpenTelemetry's current span,
    if opentelemetry-api is installed; "": none. A session's streams belong to the trace in which it was opened.

    RuntimeError in a process that was forked after a connect: gRPC does not survive that.
    """
    return Client(
        target,
        tls=tls,
        token_file=token_file,
        token_over_plain_text=token_over_plain_text,
        call_timeout=call_timeout,
        reconnect_timeout=reconnect_timeout,
        transfer_bytes=transfer_bytes,
        check_version=check_version,
        trace_parent=trace_parent,
    )


def _connected(target: bytes, options: s.ClientOptions) -> c.c_void_p:
    """The library's client. Says after a while what it waits for."""
    pointer = c.c_void_p()
    told = threading.Timer(
        _SILENT_SECONDS,
        _log.warning,
        [
            "no answer yet from %s; connect waits for it up to %g s (reconnect_timeout). Is lossd running there?",
            target.decode(),
            options.reconnect_timeout_seconds,
        ],
    )
    told.daemon = True
    told.start()
    try:
        library().call("lossd_connect", target, c.byref(options), c.byref(pointer))
    finally:
        told.cancel()
    return pointer


def impatient(client: Client) -> Client:
    """Another client of the same server, which gives up after two seconds: for what is tidied up in passing, also when
    the process ends, and must not wait for a server that has gone."""
    return client._again(call_timeout=2.0, reconnect_timeout=2.0, check_version=False)  # noqa: SLF001


_warned: set[str] = set()  # messages of VersionMismatchWarning, so that each server is warned of once


def difference_of_versions(target: str, server: str, client: str) -> str:
    """What to tell of them; empty if they differ in the last number at most, which is no difference."""
    if server.split(".")[:2] == client.split(".")[:2]:
        return ""
    return f"the server {target} is lossd {server}, this client {client}"


class Client:
    """Made by connect(). Thread-safe. A context manager, which closes it."""

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        token_file: str | os.PathLike[str] | None = None,
        token_over_plain_text: bool = False,
        call_timeout: float = 30.0,
        reconnect_timeout: float = 60.0,
        transfer_bytes: int = 4 << 20,
        check_version: bool | None = None,
        trace_parent: TraceParent = None,
    ) -> None:
        note_connecting()
        options = library().make(s.ClientOptions)
        options.call_timeout_seconds = number(call_timeout, "call_timeout")
        options.reconnect_timeout_seconds = number(reconnect_timeout, "reconnect_timeout")
        options.transfer_bytes = integer(transfer_bytes, "transfer_bytes", least=1)
        if tls is not None:
            options.tls = 1
            for name in ("ca_certificates", "certificate", "key", "server_name"):
                setattr(options, f"tls_{name}", encoded(getattr(tls, name), f"tls.{name}") or None)
        if token_file is not None:
            options.token_file = encoded(token_file, "token_file")
            options.token_over_plain_text = int(token_over_plain_text)
        trace = _trace.register(trace_parent)
        weakref.finalize(self, _trace.unregister, trace)
        _trace.install(options, trace)
        _interrupts.install(options)
        _gone.install(options, target)
        pointer = _connected(encoded(target, "target"), options)
        self._target = target
        self._again = functools.partial(
            Client, target, tls=tls, token_file=token_file, token_over_plain_text=token_over_plain_text, trace_parent=""
        )
        self._handle = Handle(pointer.value, "lossd_client_free", "this client")
        self._windows = Windows()
        if check_version or check_version is None:
            try:
                self._check_version(raises=bool(check_version))
            except BaseException:
                self.close()
                raise

    def _check_version(self, *, raises: bool) -> None:
        difference = difference_of_versions(self._target, self.status().version, library().version)
        if not difference:
            return
        if raises:
            raise VersionMismatchError(
                f"{difference}: install the same version on both sides, or connect without check_version=True"
            )
        if difference not in _warned:
            warnings.warn(
                f"{difference}: what the server lacks is refused call by call", VersionMismatchWarning, stacklevel=4
            )
            _warned.add(difference)  # not if the warning was raised as an error

    @property
    def target(self) -> str:
        return self._target

    # Heads

    def create_head(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        dtype: Any = "bfloat16",
        *,
        logit_scale: float = 1.0,
        softcap: float = 0.0,
        frozen: bool = False,
        bias: bool = False,
        optimizer: Optimizer | None = None,
        master_weights: bool = False,
        double_buffer: bool = False,
        fixed_segments: bool = False,
        held_bytes: int = 0,
        class_weights: Any = None,
    ) -> Head:
        """Creates the head, or returns it if it is there with the same configuration.

        dtype: of the weights. logit_scale, softcap: logits are softcap·tanh(logit_scale·(x·Wᵀ + b)/softcap); 0: no
        cap. frozen: the weights are not trained, dX is as ever. bias: b [V] in fp32. optimizer: lossd.SGD, Adam or
        AdamW, which Head.step runs at the server. master_weights: an fp32 copy of 16-bit weights there.
        double_buffer: batches of the next window are taken while a flush holds this one. fixed_segments: results have
        the same bits on any number of devices, as those of deterministic sessions do anyway; on one CPU about 1 %
        slower, on an H200 9 %.
        held_bytes: memory of the device where the first phase of batches leaves its exponentials for the second, V
        elements of dtype a token and a little more (docs/losses.md); devices that cannot hold them take none.
        class_weights: [V], each finite and at least 0.
        """
        config = library().make(s.HeadConfig)
        config.name = encoded(name, "name")
        config.vocab_size, config.hidden_size = integer(vocab_size, "vocab_size"), integer(hidden_size, "hidden_size")
        config.held_bytes = integer(held_bytes, "held_bytes")
        config.weight_dtype = t.DTYPES[t.dtype_name(dtype, "dtype")]
        config.logit_scale, config.softcap = number(logit_scale, "logit_scale"), number(softcap, "softcap")
        for field, value in (
            ("frozen", frozen),
            ("bias", bias),
            ("master_weights", master_weights),
            ("double_buffer", double_buffer),
            ("fixed_segments", fixed_segments),
        ):
            setattr(config, field, bool(value))
        if optimizer is not None:
            config.optimizer = c.pointer(struct_of(optimizer))
        if class_weights is not None:
            weights = t.float32_view(class_weights, "class_weights", (vocab_size,))
            config.class_weights = weights.pointer
        pointer = c.c_void_p()
        with self._handle as client:
            library().call("lossd_client_create_head", client, c.byref(config), c.byref(pointer))
        return Head(self, HeadCore.of(pointer.value, self._windows), lr=optimizer.lr if optimizer is not None else None)

    def copy_head(
        self,
        source: str,
        name: str,
        *,
        frozen: bool = False,
        master_weights: bool = False,
        source_version: int = 0,
    ) -> Head:
        """A head `name` that the server makes of what `source` is between two of its batches; no weights cross the
        network. It has the same bits in the weights' dtype, and the source's weight_version.

        frozen: it has the weights alone; else it is configured as the source and trains on as that would, with its
        optimizer's state. Its window is empty. master_weights: 16-bit weights have an fp32 master there, also of a
        frozen copy; for moving averages. source_version: what the weights must be of; 0: any. AlreadyExistsError if
        there is such a head, ResourceExhaustedError if there is no room for another one.
        """
        version = c.c_uint64(integer(source_version, "source_version"))
        pointer = c.c_void_p()
        with self._handle as client:
            library().call(
                "lossd_client_copy_head",
                client,
                encoded(source, "source"),
                encoded(name, "name"),
                int(frozen),
                int(master_weights),
                c.byref(version),
                c.byref(pointer),
            )
        return Head(self, HeadCore.of(pointer.value, self._windows))

    def head(self, name: str) -> Head:
        """The head of that name; NotFoundError if there is none."""
        return self._head(name)

    def _head(self, name: str, *, restored: bool = False) -> Head:
        pointer = c.c_void_p()
        with self._handle as client:
            library().call("lossd_client_get_head", client, encoded(name, "name"), c.byref(pointer))
        return Head(self, HeadCore.of(pointer.value, self._windows), restored=restored)

    def heads(self) -> list[HeadInfo]:
        return [from_json(HeadInfo, one) for one in self._json("lossd_client_heads")]

    def park_head(self, name: str) -> HeadInfo:
        """Frees the device's memory of a head that nobody uses: all that it is waits in the memory of the server's host
        (--parking_bytes), as HeadInfo.parked_bytes says.

        It comes back when a call wants it, which waits for that; a ResourceExhaustedError if it has no room then. Head
        objects stay good. FailedPreconditionError while it has open sessions, a write or a flush under way, and if the
        server has no parking_bytes; ResourceExhaustedError if they do not suffice.
        """
        with self._handle as client:
            return from_json(HeadInfo, library().json("lossd_client_park_head", client, encoded(name, "name")))

    def delete_head(self, name: str, *, discard_gradient: bool = False) -> None:
        """discard_gradient is needed while its window is not empty."""
        with self._handle as client:
            library().call("lossd_client_delete_head", client, encoded(name, "name"), bool(discard_gradient))
        self._windows.forget(name)

    # The server

    def status(self) -> ServerStatus:
        return from_json(ServerStatus, self._json("lossd_client_status"))

    def memory(self) -> ServerMemory:
        return from_json(ServerMemory, self._json("lossd_client_memory"))

    def traffic(self) -> Traffic:
        """What this client, its heads and their sessions have sent and received so far."""
        return from_json(Traffic, self._json("lossd_client_traffic"))

    def drain(self) -> None:
        """Ends the server as SIGTERM does."""
        with self._handle as client:
            library().call("lossd_client_drain", client)

    def restore_checkpoint(self, head: str, tag: str = "") -> CheckpointInfo:
        """The head is as it was then ("": as of its newest checkpoint), and created if it is not there. What sessions
        added since is undone: their next call is a WindowLostError."""
        with self._handle as client:
            data = library().json("lossd_client_restore_checkpoint", client, encoded(head, "head"), encoded(tag, "tag"))
        # Now, and not when the head is looked at next: it may have been restored again by then.
        self._head(head, restored=True)
        return from_json(CheckpointInfo, data)

    def checkpoints(self, head: str = "") -> list[CheckpointInfo]:
        """Newest first; "": of all heads."""
        with self._handle as client:
            data = library().json("lossd_client_checkpoints", client, encoded(head, "head"))
        return [from_json(CheckpointInfo, one) for one in data]

    def delete_checkpoint(self, head: str, tag: str) -> DeletedCheckpoint:
        """For good. A NotFoundError if there is none of that tag; the head itself goes on as it is."""
        with self._handle as client:
            data = library().json("lossd_client_delete_checkpoint", client, encoded(head, "head"), encoded(tag, "tag"))
        return from_json(DeletedCheckpoint, data)

    def create_region(self, kind: str, nbytes: int) -> Region:
        """Memory shared with a server on this host (--same_host_regions): "system", or "device" for that of its GPU."""
        number_of_kind = choice(kind, "kind", REGION_KINDS)
        pointer = c.c_void_p()
        with self._handle as client:
            library().call(
                "lossd_client_create_region",
                client,
                number_of_kind,
                integer(nbytes, "nbytes", least=1),
                c.byref(pointer),
            )
        return Region(pointer.value, kind)

    def _json(self, function: str) -> Any:
        with self._handle as client:
            return library().json(function, client)

    def close(self) -> None:
        """Heads and sessions that were made with it go on working; it makes no more. May be called again."""
        self._handle.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<lossd.Client {self._target}{', closed' if self._handle.closed else ''}>"
