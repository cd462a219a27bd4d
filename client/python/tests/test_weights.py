"""Weights in and out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lossd

MakeHead = Callable[..., lossd.Head]
V, H = 32, 16


def random_weights(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((V, H), np.float32)


def test_a_head_without_weights_says_how_it_gets_them(make_head: MakeHead) -> None:
    head = make_head(V, H, weights=None)
    with head.open_session() as session, pytest.raises(lossd.FailedPreconditionError, match="with write_weights"):
        session.compute(np.zeros((2, H), np.float32), np.zeros(2, np.int64))


@pytest.mark.parametrize("head_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(make_head: MakeHead, head_dtype: str, dtype: str) -> None:
    import torch

    weights = torch.from_numpy(random_weights()).to(getattr(torch, dtype))
    head = make_head(V, H, head_dtype, weights=None)
    assert head.dtype == head_dtype
    assert head.write_weights(weights) == 1
    out = torch.empty(V, H, dtype=weights.dtype)
    assert head.read_weights(out=out) is out
    assert torch.equal(out, weights.to(getattr(torch, head_dtype)).to(weights.dtype))
    array = head.read_weights(dtype=dtype)
    assert np.array_equal(array.view(np.uint8), out.view(torch.uint8).numpy().reshape(array.view(np.uint8).shape))


def test_bfloat16_bits(make_head: MakeHead) -> None:
    head = make_head(V, H, "bfloat16", weights=None)
    bits = (random_weights().view(np.uint32) >> 16).astype(np.uint16)
    head.write_weights(bits, dtype="bfloat16")
    assert np.array_equal(head.read_weights(dtype="bfloat16"), bits)
    with pytest.raises(TypeError, match='say dtype "bfloat16"'):
        head.write_weights(bits)


def test_strided_weights(make_head: MakeHead) -> None:
    head = make_head(V, H, weights=None)
    weights = random_weights()
    head.write_weights(np.asfortranarray(weights))
    assert np.array_equal(head.read_weights(), weights)


def test_a_bias(make_head: MakeHead) -> None:
    head = make_head(V, H, bias=True, weights=None)
    weights, bias = random_weights(), np.arange(V, dtype=np.float64)
    head.write_weights(weights, bias)
    got = np.zeros(V, np.float32)
    head.read_weights(bias_out=got)
    assert np.array_equal(got, bias)
    with pytest.raises(lossd.InvalidArgumentError, match="bias"):
        head.write_weights(weights)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\); want \(32,\)"):
        head.write_weights(weights, np.zeros(3))


def test_rows(make_head: MakeHead) -> None:
    head = make_head(V, H)
    weights = head.read_weights()
    assert np.array_equal(head.read_rows(5, 7), weights[5:12])
    assert head.read_rows(V, 0).shape == (0, H)
    head.write_weights(weights)
    with pytest.raises(lossd.FailedPreconditionError, match="version"):
        head.read_rows(0, 1, weight_version=1)
    with pytest.raises(lossd.InvalidArgumentError):
        head.read_rows(V - 1, 2)


def test_shards(make_head: MakeHead) -> None:
    head = make_head(V, H, weights=None)
    weights = random_weights()
    writes = [head.begin_write("step 1") for _ in range(2)]
    writes[0].write_rows(0, weights[:10])
    with pytest.raises(lossd.FailedPreconditionError, match="10"):
        writes[0].commit()
    assert head.info().staged_rows == 10
    writes[1].write_rows(10, weights[10:])
    assert writes[1].commit() == writes[0].commit() == 1
    assert np.array_equal(head.read_weights(), weights)
    with pytest.raises(lossd.NotFoundError):
        writes[0].write_rows(0, weights[:1])
    with pytest.raises(ValueError, match="want \\[rows, 16\\]"):
        writes[0].write_rows(0, weights[:, :3])


def test_progress(make_head: MakeHead) -> None:
    head = make_head(V, H)
    seen: list[tuple[int, int]] = []
    head.write_weights(random_weights(), progress=lambda done, total: seen.append((done, total)))
    head.read_weights(progress=lambda done, total: seen.append((done, total)))
    assert seen and all(0 <= done <= total for done, total in seen)

    def fail(done: int, total: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        head.write_weights(random_weights(), progress=fail)


def test_a_safetensors_file(tmp_path: Path) -> None:
    weights = random_weights()
    header = f'{{"lm_head.weight":{{"dtype":"F32","shape":[{V},{H}],"data_offsets":[0,{weights.nbytes}]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights.tobytes())
    with lossd.launch("cpu", weights_dir=tmp_path) as server, server.client() as client:
        head = client.create_head("a", V, H, "float32")
        loaded = head.load_weights("model.safetensors")
        assert loaded.tensor == "lm_head.weight" and loaded.weight_version == 1
        assert np.array_equal(head.read_weights(), weights)
        with pytest.raises(lossd.NotFoundError, match="other.safetensors"):
            head.load_weights("other.safetensors")


def test_checkpoints(tmp_path: Path) -> None:
    hidden, labels = np.ones((3, H), np.float32), np.arange(3)
    with lossd.launch("cpu", checkpoint_dir=tmp_path / "saved") as server, server.client() as client:
        head = client.create_head("a", V, H, "float32", optimizer=lossd.SGD())
        weights = random_weights()
        head.write_weights(weights)
        session = head.open_session()
        session.compute(hidden, labels)
        saved = head.save_checkpoint("first")
        assert saved.info.tag == "first" and saved.bytes_written > 0
        head.step(0.5)
        assert not np.array_equal(head.read_weights(), weights)
        session.compute(hidden, labels)
        info = client.restore_checkpoint("a", "first")
        assert info.window_tokens == 3
        assert np.array_equal(head.read_weights(), weights)
        with pytest.raises(lossd.WindowLostError):
            session.compute(hidden, labels)
        with head.open_session(client_key=session.client_key) as again:  # the checkpoint knows what it had
            again.compute(hidden, labels)
            assert head.flush().window_tokens == 6
        assert [one.tag for one in client.checkpoints("a")] == ["first"]
        assert client.checkpoints("b") == []
        deleted = client.delete_checkpoint("a", "first")
        assert deleted.info.tag == "first" and deleted.bytes_freed > 0
        assert client.checkpoints("a") == []
        with pytest.raises(lossd.NotFoundError):
            client.delete_checkpoint("a", "first")
