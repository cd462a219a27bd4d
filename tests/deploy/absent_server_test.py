#!/usr/bin/python3
"""A server that Prometheus scraped and no longer finds, while another goes on: with a real Prometheus and real servers,
whose alerts wait for seconds instead of minutes.

usage: absent_server_test.py LOSSD REPOSITORY
"""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any

from lossd_server import LossdServer
from prometheus_server import Prometheus
from waiting import wait_until

LOSSD, REPOSITORY = sys.argv[1], Path(sys.argv[2]).absolute()
del sys.argv[1:]

FLAGS = ("--device=cpu", "--workspace_bytes=16777216", "--memory_limit_bytes=67108864")
# Others may fire, too, as LossdDeviceMemoryLow does on a machine whose memory is full.
LOOKED_AT = ("LossdServerDown", "LossdServerAbsent")


def address(server: LossdServer) -> str:
    return server.metrics_url.split("/")[2]


class AbsentServer(unittest.TestCase):
    def setUp(self) -> None:
        self.stays = self.enterContext(LossdServer(LOSSD, *FLAGS))
        self.goes = self.enterContext(LossdServer(LOSSD, *FLAGS))
        both = address(self.stays), address(self.goes)
        self.prometheus = self.enterContext(Prometheus(REPOSITORY / "deploy/prometheus", *both, hasty=True))
        self.wait_until("two servers are counted", lambda: self.prometheus.values("statefulset:lossd_servers:count") == [2])

    def wait_until(self, what: str, reached: Any) -> None:
        wait_until(reached, lambda: f"{what}: {self.firing()}", every=0.2)

    def firing(self) -> dict[str, Any]:
        alerts = self.prometheus.api("alerts")["alerts"]
        named = {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}
        return {name: alert for name, alert in named.items() if name in LOOKED_AT}

    def wait_for_alerts(self, *names: str) -> dict[str, Any]:
        self.wait_until(f"these alerts of {LOOKED_AT} and no others: {names}", lambda: self.firing().keys() == set(names))
        return self.firing()

    def test_an_alert_tells_of_a_server_until_it_is_found_again(self) -> None:
        self.goes.stop()
        down = self.wait_for_alerts("LossdServerDown")["LossdServerDown"]
        self.assertEqual(down["labels"]["instance"], address(self.goes))

        # Gone from service discovery, too, it is not down any more.
        self.prometheus.scrape(address(self.stays))
        absent = self.wait_for_alerts("LossdServerAbsent")["LossdServerAbsent"]
        self.assertEqual(absent["labels"]["severity"], "critical")
        self.assertTrue(absent["annotations"]["summary"].startswith("1 lossd missing"), absent)
        self.assertIn(f"gone: {address(self.goes)}.", absent["annotations"]["description"])

        again = self.enterContext(LossdServer(LOSSD, *FLAGS))
        self.prometheus.scrape(address(self.stays), address(again))
        self.wait_for_alerts()


if __name__ == "__main__":
    unittest.main()
