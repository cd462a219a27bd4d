"""Servers that ask for a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lossd
import lossd.aio

TOKENS = {role: f"{role}-0123456789abcdef" for role in ("read-only", "trainer", "admin")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokens")
    made = {"tokens": folder / "tokens"}
    made["tokens"].write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    made["tokens"].chmod(0o600)
    for role, token in TOKENS.items():
        made[role] = folder / role
        made[role].write_text(token + "\n")
    return made


@pytest.fixture(scope="module")
def guarded(files: dict[str, Path]) -> Iterator[lossd.Server]:
    with lossd.launch("cpu", args=[f"--tokens={files['tokens']}"]) as server:
        yield server


def test_a_token_opens_what_its_role_may_do(guarded: lossd.Server, files: dict[str, Path]) -> None:
    with guarded.client(token_file=files["trainer"]) as client:
        client.create_head("h", 16, 4)
        with pytest.raises(lossd.PermissionDeniedError, match="role admin"):
            client.delete_head("h")
    with guarded.client(token_file=str(files["read-only"])) as client:
        assert [head.config.name for head in client.heads()] == ["h"]
        with pytest.raises(lossd.PermissionDeniedError, match="role trainer"):
            client.create_head("i", 16, 4)
    with guarded.client(token_file=files["admin"]) as client:
        client.delete_head("h")


def test_without_a_good_token_the_error_says_what_to_do(
    guarded: lossd.Server, files: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(lossd.UnauthenticatedError, match="token_file"):
        guarded.client()
    wrong = tmp_path / "wrong"
    wrong.write_text("not-one-of-them-at-all")
    with pytest.raises(lossd.UnauthenticatedError, match="not one of this server's") as error:
        guarded.client(token_file=wrong)
    assert "not-one-of-them" not in str(error.value)
    with pytest.raises(lossd.InvalidArgumentError, match="token_file"):
        guarded.client(token_file=tmp_path / "nowhere")


def test_a_token_does_not_leave_the_machine_in_plain_text(files: dict[str, Path]) -> None:
    with pytest.raises(lossd.InvalidArgumentError, match="plain text"):
        lossd.connect("lossd.invalid:50051", token_file=files["trainer"])
    with pytest.raises(lossd.UnavailableError):
        lossd.connect(
            "lossd.invalid:50051", token_file=files["trainer"], token_over_plain_text=True, reconnect_timeout=0.1
        )


def test_coroutines_take_it_too(guarded: lossd.Server, files: dict[str, Path]) -> None:
    async def heads() -> Any:
        async with lossd.aio.connect(guarded.target, token_file=files["read-only"]) as client:
            return await client.heads()

    assert asyncio.run(heads()) == []
