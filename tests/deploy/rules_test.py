#!/usr/bin/python3
"""Rules without a server: promtool on rules and configuration, the rules' unit tests, and that each rule has its unit
test, each alert its section in the runbook, each metric its line in the documentation.

usage: rules_test.py REPOSITORY   with this folder in PYTHONPATH
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import yaml
from queries import metric_names

REPOSITORY = Path(sys.argv.pop(1))
PROMETHEUS = REPOSITORY / "deploy/prometheus"
RULES = PROMETHEUS / "rules/lossd.rules.yml"
UNIT_TESTS = sorted((REPOSITORY / "tests/deploy/rules").glob("*.test.yml"))
# What Prometheus itself says, what kube-state-metrics does, and the blackbox exporter.
METRICS_OF_OTHERS = {
    "up",
    "kube_statefulset_replicas",
    "kube_statefulset_status_replicas_ready",
    "probe_success",
}
SEVERITIES = {"info", "warning", "critical"}


def promtool(*arguments):
    return subprocess.run(
        ["promtool", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


def rules(kind):
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def anchor_of(heading):
    """As GitHub and GitLab make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def expression_tests():
    for path in UNIT_TESTS:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            yield from test["promql_expr_test"]


class Rules(unittest.TestCase):
    def succeed(self, *arguments):
        done = promtool(*arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_promtool_takes_rules_and_configuration(self):
        self.succeed("check", "rules", "--lint=all", "--lint-fatal", RULES)
        self.succeed("check", "config", "--lint=all", "--lint-fatal", PROMETHEUS / "prometheus.yml")

    def test_promtool_takes_the_job_for_kubernetes_of_the_documentation(self):
        page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")
        (config,) = re.findall(r"^    scrape_configs:\n(?:    .*\n)+", page, re.MULTILINE)
        parsed = yaml.safe_load(config)
        for job in parsed["scrape_configs"]:
            del job["kubernetes_sd_configs"]  # the distribution's Prometheus is built without
            job["static_configs"] = [{"targets": ["localhost:9464"]}]
        with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as file:
            yaml.safe_dump(parsed, file)
            file.flush()
            self.succeed("check", "config", "--lint=all", "--lint-fatal", file.name)
        self.assertEqual([job["job_name"] for job in yaml.safe_load(config)["scrape_configs"]], ["lossd"])

    def test_unit_tests_of_the_rules(self):
        self.assertTrue(UNIT_TESTS)
        self.succeed("test", "rules", *UNIT_TESTS)

    def test_each_alert_has_a_case_that_fires_and_one_that_does_not(self):
        fires, silent = set(), set()
        for test in expression_tests():
            found = re.fullmatch(r'ALERTS\{alertname="(\w+)",alertstate="firing"\}', test["expr"])
            if found:
                (fires if test["exp_samples"] else silent).add(found[1])
        alerts = {rule["alert"] for rule in rules("alert")}
        self.assertEqual(fires, alerts)
        self.assertEqual(silent, alerts)

    def test_each_recording_rule_has_a_case(self):
        tested = " ".join(test["expr"] for test in expression_tests() if test["exp_samples"])
        for rule in rules("record"):
            self.assertIn(rule["record"], tested)

    def test_recording_rules_are_named_level_metric_operations(self):
        for rule in rules("record"):
            self.assertRegex(rule["record"], r"^(instance(_\w+)?|statefulset):(lossd|process)_\w+:\w+$")

    def test_each_alert_says_how_bad_it_is_and_what_to_do(self):
        for rule in rules("alert"):
            with self.subTest(rule["alert"]):
                self.assertIn(rule["labels"]["severity"], SEVERITIES)
                self.assertEqual(set(rule["annotations"]), {"summary", "description", "runbook_url"})
                self.assertGreater(len(rule["annotations"]["description"]), 80)

    def test_each_alert_has_a_section_in_the_runbook_and_each_section_an_alert(self):
        text = (REPOSITORY / "docs/alerts.md").read_text(encoding="utf-8")
        sections = [anchor_of(heading) for heading in re.findall(r"^### (.*)$", text, re.MULTILINE)]
        linked = [rule["annotations"]["runbook_url"] for rule in rules("alert")]
        self.assertEqual(sorted(f"docs/alerts.md#{section}" for section in sections), sorted(linked))
        for rule in rules("alert"):
            self.assertEqual(rule["annotations"]["runbook_url"], f"docs/alerts.md#{anchor_of(rule['alert'])}")

    def test_rules_name_metrics_that_the_documentation_has(self):
        documented = set(
            re.findall(r"`((?:lossd|process)_\w+)", (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8"))
        )
        recorded = {rule["record"] for rule in rules("record")}
        for rule in rules("record") + rules("alert"):
            for name in metric_names(rule["expr"]) - recorded - METRICS_OF_OTHERS:
                self.assertIn(re.sub(r"_(bucket|sum|count)$", "", name), documented, rule)


if __name__ == "__main__":
    unittest.main()
