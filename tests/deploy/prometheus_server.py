"""The distribution's Prometheus with the project's own configuration, rules and consoles, for tests."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from programs import Program

LISTENS = re.compile(r'msg="Listening on".* address=(127\.0\.0\.1:\d+)')
# What a proxy of the environment is asked for is never on loopback.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str) -> str:
    try:
        with OPENER.open(url, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code}\n{error.read().decode()[:2000]}") from error


class Prometheus:
    """Runs from __enter__ to __exit__; scrapes `targets` (host:port) and evaluates the rules every second. `hasty`: alerts
    wait as many seconds as the rules say minutes."""

    def __init__(self, folder: Path, *targets: str, hasty: bool = False) -> None:
        self._source, self._targets, self._hasty = folder, targets, hasty

    def __enter__(self) -> Prometheus:
        self._folder = tempfile.TemporaryDirectory()
        here = Path(self._folder.name)
        self._write_configuration()
        self._program = Program(
            "prometheus",
            f"--config.file={here}/prometheus.yml",
            f"--storage.tsdb.path={here}/data",
            f"--web.console.templates={self._source}/consoles",
            f"--web.console.libraries={self._source}/console_libraries",
            "--web.listen-address=127.0.0.1:0",
            log=here / "log",
        ).start()
        self._program.await_log("Server is ready to receive web requests")
        self.url = f"http://{self._program.wait_until(lambda: LISTENS.search(self._program.log()), 'its address')[1]}"
        return self

    def _write_configuration(self) -> None:
        here = Path(self._folder.name)
        config = yaml.safe_load((self._source / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
        config["rule_files"] = [str(self._rules(self._source.absolute() / file)) for file in config["rule_files"]]
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": list(self._targets)}]
        (here / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def _rules(self, file: Path) -> Path:
        if not self._hasty:
            return file
        text, changed = re.subn(r"^( +for: \d+)m$", r"\1s", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert changed, file
        copy = Path(self._folder.name, file.name)
        copy.write_text(text, encoding="utf-8")
        return copy

    def scrape(self, *targets: str) -> None:
        """These from now on, and no others: as an operator edits the configuration and has it read again."""
        self._targets = targets
        self._write_configuration()
        self._program.signal(signal.SIGHUP)

    def api(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of the HTTP API; an error is raised with what Prometheus says."""
        answer = json.loads(fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """The query's values now, those that are no number left out."""
        data = self.api("query", query=query)
        samples = [data["result"]] if data["resultType"] == "scalar" else [one["value"] for one in data["result"]]
        return [float(value) for _, value in samples if value != "NaN"]

    def __exit__(self, *_: object) -> None:
        self._program.stop()
        self._folder.cleanup()
