"""What docs/metrics.md says there is."""
from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass
class Metric:
    type: str
    labels: dict[str, set[str]]  # in order; an empty set: the page does not list the values
    of_ranks: bool = False  # each rank of a group has one, with a label `rank` behind the others
    of_groups: bool = False  # it is there in a group alone
    of_replicas: bool = False  # it is there in a set of replicas alone


def _list_after(text: str, words: str) -> set[str]:
    found = re.search(re.escape(words).replace("\\ ", r"\s+") + r": ([a-z_,\s]+)\.", text)
    assert found, f"docs/metrics.md has no list of {words}"
    return {name.strip() for name in found.group(1).split(",")}


def _labels(cell: str) -> dict[str, set[str]]:
    """The labels and their values in "`a`: one, two (a remark); `b`, `c`: three"."""
    labels: dict[str, set[str]] = {}
    for part in re.sub(r"\([^)]*\)", "", cell).split(";"):
        names, _, values = part.partition(":")
        for name in re.findall(r"`([a-z_]+)`", names):
            labels[name] = set()
        if values:
            labels[name] = {value.strip() for value in values.split(",")}
    return labels


def documented_metrics(path: str) -> dict[str, Metric]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    metrics: dict[str, Metric] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        every = {"head": set()} if "Each has the label `head`." in section else {}
        for names, kind, labels in re.findall(r"^\| (`[^|]+`) \| (\w+) \| ([^|]*)\|", section, re.MULTILINE):
            for name in re.findall(r"`(\w+)`", names):
                assert name not in metrics, f"{name} is documented twice"
                metrics[name] = Metric(kind, every | _labels(labels), of_groups=section.startswith("Ranks\n"),
                                       of_replicas=section.startswith("Replicas\n"))
    metrics["lossd_rejected_total"].labels["reason"] = _list_after(text, "Reasons of `lossd_rejected_total`")
    purposes = _list_after(text, "Purposes of memory")
    metrics["lossd_memory_reserved_bytes"].labels = {
        "purpose": purposes, "place": metrics["lossd_head_memory_reserved_bytes"].labels["place"]}
    metrics["lossd_head_memory_reserved_bytes"].labels["purpose"] = purposes
    for name in _list_after(text, "Metrics of each rank"):
        metrics[name].of_ranks = True
    return metrics
