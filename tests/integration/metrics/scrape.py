"""A scrape, read strictly."""
from __future__ import annotations

import re
import urllib.request
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

# Times and sizes that nobody can say beforehand.
UNSTEADY = re.compile(r"process_|lossd_process_|lossd_device_memory_bytes|lossd_checkpoint_disk_bytes|lossd_rpc|\w+_(sum|bucket)\b|\w+_age_seconds|"
                      r"\w+_timestamp_seconds")


class Scrape:
    """`values` by series, 'name{label="value"}' with labels as they are written; `types` by metric; `labels` of each of
    its samples, without le."""

    def __init__(self, url: str):
        with urllib.request.urlopen(url) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            self.text = response.read().decode()
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", self.text, re.MULTILINE))
        helps = re.findall(r"^# HELP (\S+) \S.*$", self.text, re.MULTILINE)
        twice = [name for name, times in Counter(helps).items() if times > 1]
        assert not twice and helps == list(self.types), f"each metric has one HELP and one TYPE: {twice}"
        self.values: dict[str, float] = {}
        self.labels: dict[str, set[tuple[tuple[str, str], ...]]] = {name: set() for name in self.types}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                series = sample.name
                if sample.labels:
                    series += "{" + ",".join(f'{name}="{value}"' for name, value in sample.labels.items()) + "}"
                assert series not in self.values, f"{series} is there twice"
                self.values[series] = sample.value
                base = re.sub(r"_(bucket|sum|count)$", "", sample.name)
                metric = sample.name if sample.name in self.types else base
                self.labels[metric].add(tuple((k, v) for k, v in sample.labels.items() if k != "le"))

    def __getitem__(self, series: str) -> float:
        return self.values[series]

    def since(self, before: Scrape) -> dict[str, float]:
        """What has moved, and by how much, but for what nobody can say beforehand."""
        return {series: value - before.values.get(series, 0) for series, value in self.values.items()
                if value != before.values.get(series, 0) and not UNSTEADY.match(series)}
