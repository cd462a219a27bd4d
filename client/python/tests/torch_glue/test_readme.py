"""README.md: its lines for PyTorch run as they stand, with a server of their own and with one that runs already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lossd

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "bench"))

from readme_lines import connecting, readme_lines  # noqa: E402

BEFORE = """
import copy
import torch

torch.manual_seed(1)
model = torch.nn.Module()
model.trunk = torch.nn.Linear(6, 6)
model.lm_head = torch.nn.Linear(6, 11, bias=False)
inputs, labels = torch.randn(5, 6), torch.randint(0, 11, (5,))
local = copy.deepcopy(model)
hidden = model.trunk(inputs)
"""
AFTER = """
twin = torch.optim.AdamW(local.parameters(), lr=1e-4)
torch.nn.functional.cross_entropy(local.lm_head(local.trunk(inputs)), labels).backward()
twin.step()
for (name, value), (other, wanted) in zip(model.state_dict().items(), local.state_dict().items(), strict=True):
    assert name == other
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7)
print("trained")
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_three_lines_with_a_server_of_their_own() -> None:
    done = run(BEFORE + "\n".join(readme_lines()) + AFTER)
    assert done.stdout == "trained\n", done.stderr


def test_three_lines_with_a_server_that_runs(server: lossd.Server, capsys: pytest.CaptureFixture) -> None:
    script = connecting(readme_lines(), server.target)
    assert f"client = lossd.connect({server.target!r})" in script
    exec(BEFORE + "\n".join(script) + AFTER, {})
    assert capsys.readouterr().out == "trained\n"
    with server.client() as client:
        client.delete_head("lm_head")


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_without_pytorch_it_says_what_is_needed(module: str) -> None:
    done = run(f"import sys; sys.modules['torch'] = None; import lossd.{module}")
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert "ModuleNotFoundError: lossd.torch needs PyTorch: pip install" in done.stderr
