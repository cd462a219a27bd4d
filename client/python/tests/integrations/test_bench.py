"""bench/: its programs run on a CPU, check what they time, and say when results are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[4] / "bench"
sys.path.insert(0, str(BENCH))

import real_step  # noqa: E402

STEP = ["--layers=1", "--hidden=32", "--intermediate=48", "--heads=2", "--kv-heads=1", "--batch=2", "--length=16"]


def run(program: str, *words: str, devices: Sequence[str] = ("--device=cpu",)) -> str:
    command = [sys.executable, str(BENCH / program), *devices, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_step_with_every_head_that_a_cpu_can_have(tmp_path: Path) -> None:
    figures, chart = tmp_path / "step.json", tmp_path / "step.svg"
    said = run("real_step.py", *STEP, "--vocab=96", "--steps=3", "--warmup=1", f"--json={figures}", f"--chart={chart}")
    results = {result["mode"]: result for result in json.loads(figures.read_text())["results"]}
    assert "GPU" in results.pop("liger")["skipped"]
    assert set(results) == {"torch", "lossd", "lossd-undeclared"}
    for mode, result in results.items():
        assert result["milliseconds"] > 0 and result["trainer_bytes"] > 0 and result["card_bytes"] is None
        assert f"| {mode} | {result['milliseconds']:.1f} |" in said
    drawn = ElementTree.parse(chart).getroot()
    assert len(drawn.findall("{*}rect")) == 2 * len(results)


def test_the_lines_of_the_readme(tmp_path: Path) -> None:
    figures = tmp_path / "lines.json"
    run(
        "readme_lines.py",
        "--local=eager",
        "--tokens=32",
        "--vocab=64",
        "--hidden=32",
        "--rounds=1",
        f"--json={figures}",
    )
    report = json.loads(figures.read_text())
    assert [result["transport"] for result in report["results"]] == ["ipc", "socket"]
    for result in report["results"]:
        assert result["right"] and set(result["differences"]) == {"loss", "dx", "last_loss"}
        assert result["loss"]["ratio"] > 0 and result["with_step"]["ratio"] > 0


def test_steps_beside_saves(tmp_path: Path) -> None:
    figures = tmp_path / "saves.json"
    sizes = ["--vocab=2048", "--hidden=128", "--tokens=512", "--every=12", "--saves=2", "--warmup=2"]
    said = run("checkpoint_steps.py", *sizes, f"--folder={tmp_path}", f"--json={figures}")
    report = json.loads(figures.read_text())
    assert report["checkpoint_bytes"] >= 2048 * 128 * 10
    assert report["ratio"] > 0 and report["steps_beside_a_save"] > 0
    assert f"ratio {report['ratio']:.3f}" in said


def test_a_replica_that_is_killed(tmp_path: Path) -> None:
    figures = tmp_path / "kills.json"
    sizes = ["--vocab=2048", "--hidden=128", "--tokens=64", "--kills=1", "--flag=--memory_limit_bytes=1G"]
    of_both = ("--devices", "cpu", "cpu")
    said = run("replica_restart.py", *sizes, f"--folder={tmp_path}", f"--json={figures}", devices=of_both)
    report = json.loads(figures.read_text())
    assert [len(seconds) for seconds in report["seconds"]] == [1, 1]
    assert report["checkpoint_bytes"] >= 2048 * 128 * 12
    assert "replica 1 killed: stepping again after" in said


def result(mode: str, *losses: float) -> dict[str, Any]:
    return {"mode": mode, "losses": list(losses)}


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (result("lossd", 6.005, 5.05), None),
        ({"mode": "liger", "skipped": "not installed"}, None),
        (result("lossd", 6.007, 5.0), "lossd: its first loss is 6.00700, torch's 6.00000; they may differ by 0.1 %"),
        (result("lossd", 6.0, 5.11), "lossd: its last loss"),
        (result("lossd", 6.0, 6.0), "lossd: it did not train"),
        (result("lossd", 6.0, float("nan")), "lossd: it did not train"),
        ({"mode": "lossd", "failed": "status 1"}, "lossd: status 1"),
    ],
)
def test_a_step_with_wrong_results_is_told(second: dict[str, Any], problem: str | None) -> None:
    problems = real_step.judge([result("torch", 6.0, 5.0), second])
    assert problems == [] if problem is None else problem in "\n".join(problems)


@pytest.mark.parametrize("words", [["--modes=none"], ["--steps=3", "--warmup=3"], ["--length=1"], ["--heads=3"]])
def test_bad_arguments_end_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        real_step.arguments(words)
    assert caught.value.code == 2
