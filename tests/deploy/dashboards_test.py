#!/usr/bin/python3
"""The dashboards as files: as their generator writes them, tidy, and with every metric that there is. Their queries are
for monitoring_test.py.

usage: dashboards_test.py REPOSITORY   with this folder in PYTHONPATH
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import yaml
from queries import metric_names

REPOSITORY = Path(sys.argv.pop(1))
GRAFANA = REPOSITORY / "deploy/grafana"
DASHBOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (GRAFANA / "dashboards").glob("*.json")
}
COLUMNS = 24
RULES = REPOSITORY / "deploy/prometheus/rules/lossd.rules.yml"


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def cells(place: dict[str, int]) -> set[tuple[int, int]]:
    return {
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    }


class Dashboards(unittest.TestCase):
    def test_they_are_what_the_generator_writes(self) -> None:
        command = [sys.executable, "-B", GRAFANA / "generate.py", "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(DASHBOARDS), ["lossd-device", "lossd-head", "lossd-overview"])

    def test_each_has_its_own_address_and_leads_to_the_others(self) -> None:
        for name, dashboard in DASHBOARDS.items():
            self.assertEqual(dashboard["uid"], name)
            self.assertIn("lossd", dashboard["tags"])
            self.assertIn("lossd", dashboard["links"][0]["tags"])
            self.assertNotIn("id", dashboard)  # Grafana's own, of one installation

    def test_links_between_them_lead_to_dashboards_that_are_there(self) -> None:
        for name, dashboard in DASHBOARDS.items():
            for target in re.findall(r"/d/([\w-]+)", json.dumps(dashboard)):
                self.assertIn(target, DASHBOARDS, name)

    def test_every_query_goes_to_the_chosen_data_source(self) -> None:
        for name, dashboard in DASHBOARDS.items():
            variables = [variable["name"] for variable in dashboard["templating"]["list"]]
            self.assertEqual(variables[:2], ["datasource", "instance"], name)
            for panel in panels(dashboard):
                for source in [panel["datasource"], *(target["datasource"] for target in panel["targets"])]:
                    self.assertEqual(source, {"type": "prometheus", "uid": "${datasource}"}, panel["title"])

    def test_no_panel_is_on_another_or_off_the_page(self) -> None:
        for name, dashboard in DASHBOARDS.items():
            taken: set[tuple[int, int]] = set()
            for panel in dashboard["panels"]:
                place = cells(panel["gridPos"])
                self.assertFalse(taken & place, f"{name}: {panel['title']}")
                self.assertLessEqual(max(x for x, _ in place), COLUMNS - 1, f"{name}: {panel['title']}")
                taken |= place
            # Nor is there a gap down the page.
            self.assertEqual({y for _, y in taken}, set(range(1 + max(y for _, y in taken))), name)

    def test_every_panel_says_what_it_shows_and_in_what_unit(self) -> None:
        for name, dashboard in DASHBOARDS.items():
            numbers = [panel["id"] for panel in dashboard["panels"]]
            self.assertEqual(len(set(numbers)), len(numbers))
            for panel in panels(dashboard):
                with self.subTest(dashboard=name, panel=panel["title"]):
                    self.assertTrue(panel["title"] and panel["description"])
                    references = [target["refId"] for target in panel["targets"]]
                    self.assertEqual(len(set(references)), len(references))
                    if panel["type"] in ("stat", "timeseries"):
                        self.assertTrue(panel["fieldConfig"]["defaults"]["unit"])
                    if panel["type"] == "timeseries":
                        self.assertTrue(all(target["legendFormat"] != "__auto" for target in panel["targets"]))

    def test_every_metric_is_on_a_dashboard(self) -> None:
        documented = set(
            re.findall(r"`((?:lossd|process)_\w+)", (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8"))
        )
        rules = RULES.read_text(encoding="utf-8")
        recorded = dict(re.findall(r"- record: (\S+)\n +expr: (.*)", rules))
        shown: set[str] = set()
        for dashboard in DASHBOARDS.values():
            for panel in panels(dashboard):
                for target in panel["targets"]:
                    for name in metric_names(re.sub(r"\[\$\w+\]", "[5m]", target["expr"])):
                        shown |= metric_names(recorded[name]) if name in recorded else {name}
        shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
        self.assertEqual(documented - shown, set())


def query_of(dashboard: str, title: str) -> str:
    """The only query of a panel, with what Grafana would put in the place of its variables."""
    (panel,) = (panel for panel in panels(DASHBOARDS[dashboard]) if panel["title"] == title)
    (target,) = panel["targets"]
    expression = target["expr"].replace('="$instance"', '="one"').replace("$instance", ".+")
    return expression.replace("$__rate_interval", "5m")


class Queries(unittest.TestCase):
    """What panels show of series that are given, as promtool computes it."""

    def check(self, query: str, series: dict[str, str], samples: dict[str, float]) -> None:
        """`samples`: {labels: value} after ten minutes."""
        test = {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": query,
                    "eval_time": "10m",
                    "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
                }
            ],
        }
        with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as file:
            yaml.safe_dump({"rule_files": [str(RULES.absolute())], "evaluation_interval": "1m", "tests": [test]}, file)
            file.flush()
            done = subprocess.run(["promtool", "test", "rules", file.name], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_mean_of_a_stage_is_that_of_servers_that_work(self) -> None:
        series = {
            'lossd_chunk_seconds_sum{job="lossd",instance="busy",stage="queue"}': "0+30x10",
            'lossd_chunk_seconds_count{job="lossd",instance="busy",stage="queue"}': "0+60x10",
            'lossd_chunk_seconds_sum{job="lossd",instance="idle",stage="queue"}': "0x10",
            'lossd_chunk_seconds_count{job="lossd",instance="idle",stage="queue"}': "0x10",
        }
        self.check(query_of("lossd-overview", "Stages of a chunk, mean"), series, {'{stage="queue"}': 0.5})

    def test_a_server_without_tls_has_no_certificate_that_expires(self) -> None:
        query = query_of("lossd-device", "Certificate expires in")
        series = 'lossd_tls_certificate_expiry_timestamp_seconds{job="lossd",instance="one"}'
        self.check(query, {series: "0x10"}, {})
        self.check(query, {series: "4200x10"}, {'{job="lossd",instance="one"}': 3600})


if __name__ == "__main__":
    unittest.main()
