#!/usr/bin/python3
"""A page as a browser shows it, by headless Chromium: its picture, and its DOM once scripts have run.

usage: browser.py picture URL FILE.png [WIDTH HEIGHT] | browser.py dom URL
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# CHROMIUM in the environment wins: where the distribution has none, another build of it will do.
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


def program() -> str:
    named = os.environ.get("CHROMIUM")
    for name in (named,) if named else NAMES:
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError(
        f"{named or 'Chromium'} is not there: tools/setup.sh deploy installs it; CHROMIUM=PATH names another"
    )


def _run(url: str, *options: str, patience_ms: int) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program(),
            "--headless=new",
            "--no-sandbox",  # it refuses to run as root otherwise, and the pages are our own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--no-proxy-server",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            f"--user-data-dir={profile}",
            # Time that scripts and requests get, run ahead of the clock where nothing is awaited.
            f"--virtual-time-budget={patience_ms}",
            *options,
            url,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def dom(url: str, patience_ms: int = 5000) -> str:
    """The document as it is after scripts have run for `patience_ms` of the page's own time."""
    text = _run(url, "--dump-dom", patience_ms=patience_ms)
    if not text.strip():
        raise RuntimeError(f"{url} gave no document: does anything answer there?")
    return text


def picture(url: str, file: Path, width: int = 1400, height: int = 1000, patience_ms: int = 5000) -> None:
    """Writes a PNG of the upper left `width` times `height` pixels."""
    file.unlink(missing_ok=True)
    _run(url, f"--screenshot={file.absolute()}", f"--window-size={width},{height}", patience_ms=patience_ms)
    if not file.exists():
        raise RuntimeError(f"no picture of {url} was made")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["dom"] and len(arguments) == 2:
        print(dom(arguments[1]))
    elif arguments[:1] == ["picture"] and len(arguments) in (3, 5):
        picture(arguments[1], Path(arguments[2]), *map(int, arguments[3:]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
