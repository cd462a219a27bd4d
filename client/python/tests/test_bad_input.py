"""Arguments that cannot be right: which exception, naming what; and that the next call works."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lossd
from lossd import client as client_module
from lossd import errors

MakeHead = Callable[..., lossd.Head]
V, H, N = 32, 16, 4
HIDDEN = np.ones((N, H), np.float32)
LABELS = np.arange(N)


def readonly() -> Any:
    array = np.zeros((N, H), np.float32)
    array.flags.writeable = False
    return array


# What is given, which exception, what its message has to name.
CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("hidden size", {"hidden": HIDDEN[:, :5]}, ValueError, r"hidden has shape \(4, 5\); want \[\.\.\., 16\]"),
    ("hidden scalar", {"hidden": np.float32(1)}, ValueError, r"hidden has shape \(\)"),
    ("hidden float64", {"hidden": HIDDEN.astype(np.float64)}, TypeError, "hidden has dtype float64; want one of"),
    ("hidden int", {"hidden": torch.ones(N, H, dtype=torch.int64)}, TypeError, "hidden has dtype int64"),
    ("hidden uint16", {"hidden": HIDDEN.astype(np.uint16)}, TypeError, 'say dtype "bfloat16"'),
    ("hidden complex", {"hidden": HIDDEN.astype(np.complex64)}, TypeError, "complex64"),
    ("hidden text", {"hidden": "text"}, TypeError, "hidden"),
    ("hidden None", {"hidden": None}, TypeError, "hidden is a NoneType"),
    ("hidden ragged", {"hidden": [[1.0], [1.0, 2.0]]}, TypeError, "hidden is a list"),
    ("hidden meta", {"hidden": torch.ones(N, H, device="meta")}, ValueError, "hidden is on meta"),
    ("hidden sparse", {"hidden": torch.eye(4, H).to_sparse()}, TypeError, "layout torch.sparse_coo"),
    ("hidden NaN", {"hidden": HIDDEN * np.nan}, lossd.InvalidArgumentError, "hidden_states"),
    ("labels shape", {"labels": LABELS[:3]}, ValueError, r"labels has shape \(3,\); want \(4,\)"),
    ("labels extra axis", {"labels": LABELS[:, None]}, ValueError, r"labels has shape \(4, 1\); want \(4,\)"),
    ("labels float", {"labels": LABELS.astype(np.float32)}, TypeError, "labels has dtype float32; want integers"),
    ("labels bool", {"labels": torch.ones(N, dtype=torch.bool)}, TypeError, "labels has dtype torch.bool"),
    ("labels numpy bool", {"labels": np.ones(N, bool)}, TypeError, "labels has dtype bool"),
    ("labels beyond int64", {"labels": np.full(N, 2**63, np.uint64)}, ValueError, "beyond int64"),
    ("labels negative", {"labels": LABELS - 1}, lossd.InvalidArgumentError, "-1"),
    ("labels too large", {"labels": LABELS + V - 2}, lossd.InvalidArgumentError, "32"),
    ("mode", {"mode": "train"}, ValueError, "mode is 'train'; want one of 'gradients', 'loss'"),
    ("reduction", {"reduction": "none"}, ValueError, "reduction is 'none'; want one of 'sum', 'mean', 'late_mean'"),
    ("class_weights", {"class_weights": True}, ValueError, "class_weights is True; want one of"),
    ("no class weights", {"class_weights": "use"}, lossd.InvalidArgumentError, "class weights"),
    ("no bias", {"bias": "use"}, lossd.InvalidArgumentError, "bias"),
    ("softcap", {"softcap": -1.0}, lossd.InvalidArgumentError, "softcap"),
    ("softcap NaN", {"softcap": float("nan")}, ValueError, "softcap is NaN"),
    ("logit_scale NaN", {"logit_scale": float("nan")}, ValueError, "logit_scale is NaN"),
    ("normalizer NaN", {"reduction": "mean", "normalizer": np.float64("nan")}, ValueError, "normalizer is NaN"),
    ("z_normalizer NaN", {"reduction": "mean", "z_normalizer": float("nan")}, ValueError, "z_normalizer is NaN"),
    ("smoothing", {"label_smoothing": 1.5}, lossd.InvalidArgumentError, "label_smoothing"),
    ("smoothing text", {"label_smoothing": "0.1"}, TypeError, "label_smoothing is a str; want a number"),
    ("normalizer", {"reduction": "mean", "normalizer": 0}, lossd.InvalidArgumentError, "normalizer"),
    ("ignore_index", {"ignore_index": 1.5}, TypeError, "ignore_index is a float; want an int"),
    ("first_token", {"first_token": -1}, ValueError, "first_token is -1; want 0"),
    ("weight_version", {"weight_version": -1}, ValueError, "weight_version is -1"),
    ("returns", {"returns": ["lse"]}, ValueError, "'lse'; there are log_sum_exp"),
    ("top_k missing", {"returns": ["top_k"]}, ValueError, "say how many"),
    ("top_k", {"top_k": 65}, ValueError, "top_k is 65; want 0 to 64"),
    ("divergences", {"returns": ["divergences"]}, lossd.InvalidArgumentError, "divergences"),
    ("token_weights", {"token_weights": np.ones(3)}, ValueError, r"token_weights has shape \(3,\); want \(4,\)"),
    ("token_weights text", {"token_weights": ["a"] * 4}, TypeError, "token_weights has dtype"),
    ("token_weights NaN", {"token_weights": [1, 2, 3, np.nan]}, lossd.InvalidArgumentError, "token_weights"),
    ("dx dtype", {"dx_dtype": "float64"}, ValueError, "dx_dtype is 'float64'; want one of"),
    ("dx shape", {"dx": np.zeros((N, 3), np.float32)}, ValueError, r"dx has shape \(4, 3\); want \(4, 16\)"),
    ("dx other dtype", {"dx": np.zeros((N, H), np.float16)}, TypeError, "dx has dtype float16; want float32"),
    ("dx strided", {"dx": np.zeros((H, N), np.float32).T}, ValueError, "dx is not dense"),
    ("dx read-only", {"dx": readonly()}, ValueError, "dx cannot be written to"),
    ("dx expanded", {"dx": torch.zeros(1, H).expand(N, H)}, ValueError, "dx is not dense"),
    ("out name", {"out": {"loses": LABELS}}, ValueError, "'loses'"),
    ("out dtype", {"out": {"losses": np.zeros(N)}}, TypeError, r"out\['losses'\] has dtype float64; want float32"),
    ("out list", {"out": {"losses": [0.0] * 4}}, TypeError, r"out\['losses'\] is a list"),
    ("distillation", {"distillation": "teacher"}, TypeError, "want lossd.Distillation"),
    (
        "teacher",
        {"distillation": lossd.Distillation("nobody", HIDDEN)},
        lossd.NotFoundError,
        "nobody",
    ),
    (
        "teacher shape",
        {"distillation": lossd.Distillation("nobody", HIDDEN[:2])},
        ValueError,
        r"distillation.hidden has shape \(2, 16\)",
    ),
    (
        "divergence",
        {"distillation": lossd.Distillation("nobody", HIDDEN, divergence="kl")},
        ValueError,
        "distillation.divergence is 'kl'",
    ),
]


@pytest.mark.parametrize("given, error, message", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_compute(make_head: MakeHead, given: dict[str, Any], error: type[Exception], message: str) -> None:
    head = make_head(V, H)
    arguments = {"hidden": HIDDEN, "labels": LABELS, **given}
    with head.open_session() as session:
        with pytest.raises(error, match=message) as raised:
            session.compute(**arguments)
        assert isinstance(raised.value, (TypeError, ValueError, lossd.LossdError))
        assert session.compute(HIDDEN, LABELS).valid_tokens == N  # the session goes on
        assert head.flush().window_tokens == N


HEADS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"vocab_size": 0}, lossd.InvalidArgumentError, "vocab_size"),
    ({"vocab_size": 1.5}, TypeError, "vocab_size is a float; want an int"),
    ({"hidden_size": -3}, ValueError, "hidden_size is -3"),
    ({"dtype": "int8"}, ValueError, "dtype is 'int8'; want one of float32"),
    ({"dtype": torch.float64}, ValueError, "dtype is torch.float64"),
    ({"name": ""}, lossd.InvalidArgumentError, "name"),
    ({"name": 3}, TypeError, "name must be a str"),
    ({"name": "a\0b"}, ValueError, "zero byte"),
    ({"logit_scale": 0.0}, lossd.InvalidArgumentError, "logit_scale"),
    ({"optimizer": "adamw"}, TypeError, "optimizer is a str; want lossd.SGD"),
    ({"optimizer": lossd.AdamW(betas=(1.0, 0.9))}, lossd.InvalidArgumentError, "beta1"),
    ({"class_weights": np.ones(3)}, ValueError, r"class_weights has shape \(3,\); want \(32,\)"),
    ({"class_weights": -np.ones(V)}, lossd.InvalidArgumentError, "class_weights"),
    ({"vocab_size": 1 << 40, "hidden_size": 1 << 20}, lossd.LossdError, "."),
]


@pytest.mark.parametrize("given, error, message", HEADS)
def test_create_head(client: lossd.Client, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        client.create_head(**{"name": "bad", "vocab_size": V, "hidden_size": H, **given})
    assert "bad" not in [one.config.name for one in client.heads()]


def test_heads_that_are_not_there(client: lossd.Client, make_head: MakeHead) -> None:
    with pytest.raises(lossd.NotFoundError, match="nobody"):
        client.head("nobody")
    with pytest.raises(lossd.NotFoundError, match="nobody"):
        client.delete_head("nobody")
    head = make_head(V, H)
    with pytest.raises(lossd.AlreadyExistsError, match=head.name):
        client.create_head(head.name, V + 1, H, "float32")
    assert client.create_head(head.name, V, H, "float32").info().weight_version == 1
    with head.open_session() as session:
        session.compute(HIDDEN, LABELS)
        with pytest.raises(lossd.FailedPreconditionError):
            client.delete_head(head.name)


def test_no_weights_no_optimizer_frozen(make_head: MakeHead) -> None:
    head = make_head(V, H, weights=None)
    with head.open_session() as session:
        with pytest.raises(lossd.FailedPreconditionError, match="weights"):
            session.compute(HIDDEN, LABELS)
    with pytest.raises(lossd.FailedPreconditionError, match="optimizer"):
        head.step(0.1)
    frozen = make_head(V, H, frozen=True)
    with frozen.open_session() as session:
        assert session.compute(HIDDEN, LABELS).dx is not None
    with pytest.raises(lossd.FailedPreconditionError, match="frozen"):
        frozen.flush()


def test_write_weights(make_head: MakeHead) -> None:
    head = make_head(V, H)
    for weights, error, message in (
        (np.zeros((V, H + 1), np.float32), ValueError, r"weights has shape \(32, 17\); want \(32, 16\)"),
        (np.zeros(V * H, np.float32), ValueError, "weights has shape"),
        (np.zeros((V, H)), TypeError, "weights has dtype float64"),
    ):
        with pytest.raises(error, match=message):
            head.write_weights(weights)
    assert head.info().weight_version == 1
    with pytest.raises(ValueError, match="out has shape"):
        head.read_weights(out=np.zeros((H, V), np.float32))
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        head.read_weights(dtype="int8")
    with pytest.raises(TypeError, match="lr is a str"):
        head.step("0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr is NaN"):
        head.step(float("nan"))
    with pytest.raises(ValueError, match="out has shape"):
        head.flush(np.zeros((V, 3), np.float32))


def test_sessions(make_head: MakeHead) -> None:
    head = make_head(V, H)
    with pytest.raises(ValueError, match="lanes is 65"):
        head.open_session(lanes=65)
    with pytest.raises(lossd.InvalidArgumentError, match="lanes"):
        head.open_session(lanes=17)
    with pytest.raises(TypeError, match="rank is a str"):
        head.open_session(rank="0")  # type: ignore[arg-type]
    session = head.open_session()
    with pytest.raises(ValueError, match="sequences is 0"):
        session.resume_at([0])
    with pytest.raises(lossd.InvalidArgumentError):
        session.resume_at([1, 1, 1, 1])
    session.close()
    session.close()
    for call in (lambda: session.compute(HIDDEN, LABELS), lambda: session.compute_async(HIDDEN, LABELS)):
        with pytest.raises(ValueError, match="session is closed"):
            call()


def test_connect(server: lossd.Server) -> None:
    with pytest.raises(lossd.UnavailableError, match="no-such-socket") as raised:
        lossd.connect("unix:/tmp/no-such-socket", reconnect_timeout=0.2)
    assert isinstance(raised.value, ConnectionError) and raised.value.code == "UNAVAILABLE"
    with pytest.raises(lossd.InvalidArgumentError, match="call_timeout"):
        lossd.connect(server.target, call_timeout=-1)
    with pytest.raises(TypeError, match="target must be a str"):
        lossd.connect(50051)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="call_timeout"):
        lossd.connect(server.target, call_timeout="60")  # type: ignore[arg-type]
    client = server.client()
    client.close()
    client.close()
    with pytest.raises(ValueError, match="client is closed"):
        client.status()


def test_a_session_that_ended_with_an_error(make_head: MakeHead) -> None:
    head = make_head(V, H)
    session = head.open_session(client_key="mine")
    with pytest.raises(lossd.FailedPreconditionError, match="weight_version is 9"):
        session.compute(HIDDEN, LABELS, weight_version=9)
    with pytest.raises(lossd.FailedPreconditionError, match="ended with an earlier error"):
        session.compute(HIDDEN, LABELS)
    with head.open_session(client_key="mine") as again:
        again.compute(HIDDEN, LABELS)
    assert head.flush().window_tokens == N


def test_the_wrong_tls_files(server: lossd.Server, tmp_path: Any) -> None:
    with pytest.raises(lossd.LossdError, match="ca.pem"):
        lossd.connect(server.target, tls=lossd.Tls(ca_certificates=tmp_path / "ca.pem"), reconnect_timeout=0.5)


@pytest.mark.parametrize("version, same", [("0.1.7", True), ("0.2.0", False), ("1.1.0", False)])
def test_versions(server: lossd.Server, monkeypatch: pytest.MonkeyPatch, version: str, same: bool) -> None:
    monkeypatch.setattr(client_module.library(), "version", version)
    monkeypatch.setattr(client_module, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for check_version in (None, None, False):
            with server.client(check_version=check_version) as client:
                assert client.status().version == "0.1.0"
    told = [str(warning.message) for warning in caught if issubclass(warning.category, lossd.VersionMismatchWarning)]
    if same:
        assert told == []
        server.client(check_version=True).close()
        return
    assert len(told) == 1, "once a server"
    assert f"{server.target} is lossd 0.1.0, this client {version}" in told[0]
    with pytest.raises(lossd.VersionMismatchError, match=f"is lossd 0.1.0, this client {version}"):
        server.client(check_version=True)


def test_a_warning_of_versions_may_be_made_an_error(server: lossd.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module.library(), "version", "0.2.0")
    monkeypatch.setattr(client_module, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", lossd.VersionMismatchWarning)
        for _ in range(2):
            with pytest.raises(lossd.VersionMismatchWarning):
                server.client()


def test_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from lossd import _library, _structs

    path = str(_library.library().path)
    monkeypatch.setenv("LOSSD_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(lossd.LibraryError, match="none.so.*LOSSD_LIBRARY"):
        _library.library.__wrapped__()
    (tmp_path / "none.so").write_text("no library")
    with pytest.raises(lossd.LibraryError, match="could not be loaded"):
        _library.library.__wrapped__()
    monkeypatch.setattr(_structs, "LOSSD_C_API_VERSION", 99)
    monkeypatch.setenv("LOSSD_LIBRARY", path)
    with pytest.raises(lossd.VersionMismatchError, match=r"C interface \d+, this package needs 99"):
        _library.library.__wrapped__()
    assert lossd.library_version() == lossd.__version__


def test_errors_pickle_and_have_codes() -> None:
    for number in range(1, 17):
        error = errors.error_of(number, "why")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and again.message == "why" and again.code == error.code
    assert isinstance(errors.error_of(100, "lost"), lossd.WindowLostError)
    assert type(errors.error_of(77, "later")) is lossd.UnknownError


@pytest.mark.parametrize(
    ("rows", "message"), [(12, "if its last rows are padding, write the first 10 rows"), (8, "a teacher needs")]
)
def test_a_teacher_of_another_vocabulary_is_refused_with_what_to_do(
    client: lossd.Client, rows: int, message: str
) -> None:
    student = client.create_head("student", 10, 4, "float32")
    try:
        teacher = client.create_head("padded", rows, 4, "float32", frozen=True)
        student.write_weights(np.zeros((10, 4), np.float32))
        teacher.write_weights(np.zeros((rows, 4), np.float32))
        hidden = np.ones((6, 4), np.float32)
        taught = lossd.Distillation(teacher="padded", hidden=hidden)
        with student.open_session() as session, pytest.raises(lossd.InvalidArgumentError, match=message) as refused:
            session.compute(hidden, np.arange(6), distillation=taught)
        assert "nothing of the batch is in the window" in str(refused.value)
        assert student.info().window_tokens == 0
    finally:
        for name in ("padded", "student"):
            client.delete_head(name, discard_gradient=True)
