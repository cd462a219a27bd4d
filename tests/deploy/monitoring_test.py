#!/usr/bin/python3
"""Rules, dashboards and consoles against the real thing: a lossd under load, a Prometheus that scrapes it, a browser.

Each query of a panel, a rule or a console must give data, so that a metric or label that is renamed fails here.

usage: monitoring_test.py LOSSD REPOSITORY [PICTURES [SECONDS]]

PICTURES: a folder to keep the pages' pictures in. SECONDS: for how long to train first, so that lines are long.
"""

from __future__ import annotations

import contextlib
import html.parser
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import grpc
import yaml
from certificates import Authority
from lossd.v1 import gradient_pb2, gradient_pb2_grpc, head_pb2
from lossd_server import LossdServer, ReplicaSet
from PIL import Image
from prometheus_server import Prometheus, fetch
from queries import narrow_selectors
from streaming import create_head, open_session
from training import Training
from waiting import wait_until

LOSSD, REPOSITORY = sys.argv[1], Path(sys.argv[2]).absolute()
PICTURES = Path(sys.argv[3]) if len(sys.argv) > 3 else None
TRAIN_FOR = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
del sys.argv[1:]

DASHBOARDS = sorted((REPOSITORY / "deploy/grafana/dashboards").glob("*.json"))
CONSOLES = sorted((REPOSITORY / "deploy/prometheus/consoles").glob("*.html"))
RULES = REPOSITORY / "deploy/prometheus/rules/lossd.rules.yml"
# What a browser would put in the place of the variables.
VARIABLES = {"$__rate_interval": "1m", "$window": "1m", "$head": ".+"}
PAUSE = 0.2

PATIENCE = 60.0  # seconds that a test waits for what is not there yet: a guard, and long

running = contextlib.ExitStack()


def setUpModule() -> None:  # noqa: N802 (unittest's name)
    global server, prometheus, trained
    unittest.addModuleCleanup(running.close)
    folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
    authority = Authority(folder)
    authority.issue("server")
    flags = [
        "--devices=cpu,cpu",  # what there is of one device is there of a group, too
        "--workspace_bytes=16777216",
        "--memory_limit_bytes=268435456",
        f"--checkpoint_dir={folder}/c",
    ]
    server = running.enter_context(LossdServer(LOSSD, *flags, *authority.server_flags()))
    prometheus = running.enter_context(Prometheus(REPOSITORY / "deploy/prometheus", server.metrics_url.split("/")[2]))
    credentials = grpc.ssl_channel_credentials(authority.certificate("ca").read_bytes())
    channel = running.enter_context(grpc.secure_channel(server.target, credentials))
    training = running.enter_context(Training(channel))
    training.wait(rounds=16)  # everything has happened once: the first checkpoint ends the sixteenth
    trained = time.time()
    time.sleep(TRAIN_FOR)
    wait_for_scrapes(3)


def is_of_replicas(query: str) -> bool:
    """This server is none: Replicas below has some."""
    return "lossd_replica_" in query


def is_elsewhere(selector: str) -> bool:
    """Those of kube-state-metrics and the blackbox exporter, too."""
    return selector.startswith(("kube_", "probe_")) or is_of_replicas(selector)


def wait_for_scrapes(number: int) -> None:
    """Since everything has happened once: by the clock that Prometheus goes by, too."""

    def times() -> list[float]:
        found = prometheus.api("query", query='lossd_tokens_total{kind="valid"}[1h]')["result"]
        return [at for series in found for at, _ in series["values"] if at > trained]

    wait_for(f"{number} scrapes", times, lambda found: len(found) >= number)


def wait_for(what: str, get: Any, enough: Any) -> Any:
    """What `get` gives, once that is `enough`."""
    def found() -> Any:
        value = get()
        return value and enough(value) and value

    return wait_until(found, what, PATIENCE, PAUSE)


def values(query: str) -> list[float]:
    """The query's values, at least one."""
    return wait_for(query, lambda: prometheus.values(query), bool)  # type: ignore[no-any-return]


def substituted(expression: str) -> str:
    """With `instance` for $instance where it is compared for equality and .+ where for a match."""
    expression = expression.replace('instance="$instance"', f'instance="{instance()}"').replace("$instance", ".+")
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def instance() -> str:
    return str(prometheus.api("query", query="lossd_build_info")["result"][0]["metric"]["instance"])


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


class Page(html.parser.HTMLParser):
    """Queries of a console page with the text behind each, and its graphs' lines."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.queries: list[str] = []
        self.figures: list[str] = []
        self.lines: list[str] = []
        self._in_value = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("data-query"):
            self.queries.append(found["data-query"] or "")
        if tag == "path":
            self.lines.append(found.get("d") or "")
        self._in_value = found.get("class") == "value"

    def handle_data(self, data: str) -> None:
        if self._in_value:
            self.figures.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_value = False


class Metrics(unittest.TestCase):
    def test_promtool_finds_nothing_to_say_about_them(self) -> None:
        text = fetch(server.metrics_url)
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))


class Rules(unittest.TestCase):
    def test_every_series_that_a_rule_names_is_there(self) -> None:
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                for selector in narrow_selectors(rule["expr"]):
                    if is_elsewhere(selector):
                        continue
                    with self.subTest(rule=rule.get("alert") or rule["record"], selector=selector):
                        values(selector)

    def test_every_recording_rule_gives_values(self) -> None:
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "record" in rule and not is_of_replicas(rule["record"]):
                    with self.subTest(rule["record"]):
                        values(rule["record"])

    def test_prometheus_evaluates_all_of_them(self) -> None:
        for group in prometheus.api("rules")["groups"]:
            for rule in group["rules"]:
                self.assertEqual((rule["health"], rule.get("lastError", "")), ("ok", ""), rule["name"])

    def test_what_went_wrong_fires_alerts_that_name_the_server(self) -> None:
        def firing() -> dict[str, Any]:
            return {
                one["labels"]["alertname"]: one
                for one in prometheus.api("alerts")["alerts"]
                if one["state"] == "firing"
            }

        alerts = wait_for("alerts", firing, lambda found: {"LossdBadLabels", "LossdNonFinite"} <= found.keys())
        for name, alert in alerts.items():
            self.assertIn(instance(), alert["annotations"]["summary"], name)
            self.assertNotIn("error", alert["annotations"]["summary"], name)
        # Nothing else does: this server is well.
        self.assertEqual(alerts.keys(), {"LossdBadLabels", "LossdNonFinite"})

    def test_the_certificate_has_a_day_on_which_it_expires(self) -> None:
        values("lossd_tls_certificate_expiry_timestamp_seconds > time()")


class Dashboards(unittest.TestCase):
    def test_every_query_of_every_panel_gives_values(self) -> None:
        self.assertEqual(len(DASHBOARDS), 3)
        for path in DASHBOARDS:
            for panel in panels(json.loads(path.read_text(encoding="utf-8"))):
                for target in panel["targets"]:
                    if "lossd_gpu_" in target["expr"] or is_of_replicas(target["expr"]):  # there is no GPU here
                        continue
                    with self.subTest(dashboard=path.name, panel=panel["title"], query=target["expr"]):
                        values(substituted(target["expr"]))

    def test_every_series_that_a_panel_names_is_there(self) -> None:
        """Also those of one side of an `or`, which the panel's query does without."""
        for path in DASHBOARDS:
            for panel in panels(json.loads(path.read_text(encoding="utf-8"))):
                for target in panel["targets"]:
                    for selector in narrow_selectors(substituted(target["expr"])):
                        if selector.startswith("lossd_gpu_") or is_of_replicas(selector):  # there is no GPU here
                            continue
                        with self.subTest(dashboard=path.name, panel=panel["title"], selector=selector):
                            values(selector)

    def test_variables_and_annotations_have_values(self) -> None:
        for path in DASHBOARDS:
            dashboard = json.loads(path.read_text(encoding="utf-8"))
            for annotation in dashboard["annotations"]["list"]:
                values(substituted(annotation["expr"]))
            for variable in dashboard["templating"]["list"]:
                if variable["type"] == "query":
                    found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                    assert found, variable
                    chosen = prometheus.api(f"label/{found[2]}/values", **{"match[]": substituted(found[1])})
                    self.assertTrue(chosen, variable["query"])


def console(name: str) -> Page:
    """Without any script, once none of its figures is missing."""
    return wait_for(  # type: ignore[no-any-return]
        f"figures of {name}",
        lambda: Page(fetch(f"{prometheus.url}/consoles/{name}")),
        lambda page: "–" not in page.figures,
    )


class Consoles(unittest.TestCase):
    def test_every_query_of_every_console_gives_values(self) -> None:
        self.assertEqual(len(CONSOLES), 3)
        for path in CONSOLES:
            page = console(path.name)
            self.assertGreater(len(page.queries), 10, path.name)
            for query in page.queries:
                for expression in [substituted(query), *narrow_selectors(substituted(query))]:
                    with self.subTest(console=path.name, query=expression):
                        values(expression)

    def test_tables_that_are_too_wide_scroll_by_themselves(self) -> None:
        for path in CONSOLES:
            text = fetch(f"{prometheus.url}/consoles/{path.name}")
            self.assertEqual(text.count("<table>"), text.count('<div class="table"><table>'), path.name)

    def test_figures_are_there_without_any_script(self) -> None:
        for path in CONSOLES:
            self.assertGreater(len(console(path.name).figures), 10)

    def test_heads_are_chosen_by_the_address_and_quotes_in_it_do_no_harm(self) -> None:
        text = fetch(f"{prometheus.url}/consoles/lossd-head.html?instance={instance()}&head=draft")
        self.assertIn("<title>lossd: head draft</title>", text)
        self.assertIn('head="draft"', Page(text).queries[0])
        text = fetch(f"{prometheus.url}/consoles/lossd-head.html?instance={instance()}&head=%22%7D%3Cscript%3Ex")
        self.assertNotIn("<script>x", text)
        self.assertIn("–", Page(text).figures)

    def test_the_pages_load_nothing_from_elsewhere(self) -> None:
        for path in CONSOLES:
            text = fetch(f"{prometheus.url}/consoles/{path.name}")
            self.assertEqual(re.findall(r"""(?:src|href)=["'](?!lossd-)[^"']*""", text), [])
            self.assertNotRegex(text, r"@import|url\(")


class Replicas(unittest.TestCase):
    def test_what_is_asked_of_replicas_gives_values(self) -> None:
        with contextlib.ExitStack() as stack:
            servers = stack.enter_context(ReplicaSet(LOSSD, 2, "--workspace_bytes=16777216"))
            hosts = [one.metrics_url.split("/")[2] for one in servers]
            asked = stack.enter_context(Prometheus(REPOSITORY / "deploy/prometheus", *hosts))
            windows = self.windows(stack.enter_context(grpc.insecure_channel(servers[1].target)))
            queries = [query for query in self.queries(hosts[0]) if is_of_replicas(query)]
            self.assertGreater(len(queries), 8)
            for query in queries:
                for expression in [query, *narrow_selectors(query)]:
                    with self.subTest(expression):
                        # Rates are of what goes on.
                        wait_for(expression, lambda query=expression: (next(windows), asked.values(query))[1], bool)
            text = fetch(f"{asked.url}/consoles/lossd-server.html?instance={hosts[0]}")
            self.assertIn(">whole</span><small>set s, replica 0<", text)
            page = Page(text)
            self.assertEqual(len([query for query in page.queries if is_of_replicas(query)]), 2, page.queries)

    def windows(self, channel: grpc.Channel) -> Iterator[int]:
        """Ends one each time."""
        create_head(channel, "h", 64, 8, optimizer=head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_SGD))
        open_session(channel, "h", "client")
        for generation in itertools.count(1):
            step = gradient_pb2.ApplyStepRequest(head="h", generation=generation, learning_rate=0.1)
            gradient_pb2_grpc.GradientServiceStub(channel).ApplyStep(step)
            yield generation

    def queries(self, host: str) -> Iterator[str]:
        """Those of recording rules, alerts' series and panels; the latter about the server at `host`."""
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                yield from [rule["record"]] if "record" in rule else narrow_selectors(rule["expr"])
        for path in DASHBOARDS:
            for panel in panels(json.loads(path.read_text(encoding="utf-8"))):
                for target in panel["targets"]:
                    query = target["expr"].replace('instance="$instance"', f'instance="{host}"')
                    yield query.replace("$instance", ".+").replace("$__rate_interval", "1m")


class Pictures(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        wait_for_scrapes(10)  # for lines that are lines
        for path in CONSOLES:
            console(path.name)

    def drawn(self, file: Path) -> dict[tuple[int, int, int], int]:
        """The picture's colors, after checking that it is one of text and shapes, and no empty page."""
        with Image.open(file) as image:
            colors = image.convert("RGB").getcolors(maxcolors=1 << 24)
            size = image.width * image.height
        most = max(count for count, _ in colors)
        self.assertGreater(len(colors), 100, file)
        self.assertLess(most, 0.97 * size, file)
        return {color: count for count, color in colors}

    def folder(self) -> Path:
        folder = PICTURES or Path(running.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def test_the_consoles_show_live_figures_and_lines(self) -> None:
        for path in CONSOLES:
            url = f"{prometheus.url}/consoles/{path.name}?range=5m"
            page = Page(browser.dom(url))
            self.assertNotIn("–", page.figures)
            graphs = [query for query in page.queries if "$window" in query]
            self.assertGreaterEqual(len(page.lines), len(graphs))
            self.assertTrue([line for line in page.lines if line.count("L") >= 3], page.lines)
            self.assertEqual([line for line in page.lines if "L" not in line], [], path.name)
            file = self.folder() / f"{path.stem}.png"
            browser.picture(url, file, 1400, 1300)
            first_line = (0x2E, 0x6F, 0xD8)  # of every graph
            self.assertGreater(self.drawn(file).get(first_line, 0), 100, path.name)

    def test_a_console_that_stays_open_goes_on(self) -> None:
        """The page fetches itself every ten seconds of its own time; what it shows after three times is whole."""
        page = Page(browser.dom(f"{prometheus.url}/consoles/lossd-overview.html?range=5m", patience_ms=35000))
        self.assertNotIn("–", page.figures)
        self.assertEqual([line for line in page.lines if "L" not in line], [])
        self.assertGreaterEqual(len(page.lines), len([query for query in page.queries if "$window" in query]))


if __name__ == "__main__":
    unittest.main()
