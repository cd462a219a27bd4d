#!/usr/bin/python3
"""What lossctl shows of servers that hold replicas of the same heads."""
import json
import os
import sys
import unittest

from lossd_server import ReplicaSet
from programs import run
from waiting import wait_until

LOSSD, LOSSCTL = sys.argv[1:3]
del sys.argv[1:]

KEYS = {"name", "replica", "replicas", "whole", "why_not", "epochs", "returns", "history", "members"}


def status(server, *flags):
    return run(LOSSCTL, "status", *flags, env={**os.environ, "LOSSD_SERVER": server.target}, check=True).stdout


def replicas(server):
    return json.loads(status(server, "--json"))["replicas"]


class Replicas(unittest.TestCase):
    def test_status_tells_the_set_and_who_is_missing(self):
        with ReplicaSet(LOSSD, 2, "--workspace_bytes=16M") as servers:
            first, second = (replicas(server) for server in servers)
            self.assertEqual(set(first), KEYS)
            self.assertEqual([(of["name"], of["replica"], of["replicas"], of["whole"], of["why_not"], of["epochs"])
                              for of in (first, second)], [("s", 0, 2, True, "", 1), ("s", 1, 2, True, "", 1)])
            self.assertEqual(first["history"], second["history"])
            self.assertNotEqual(first["history"], 0)
            self.assertEqual(first["members"], [
                {"replica": replica, "sessions_placed": 0, "late_seconds": {"seal": 0, "sum": 0, "step": 0, "flush": 0}}
                for replica in (0, 1)])
            self.assertEqual(second["members"], [], "the coordinator alone sees all of them")
            text = status(servers[0])
            self.assertRegex(text, r"(?m)^  replica      0 of 2 \(set s\), all are there; met 1 time, went back 0 times$")
            self.assertRegex(text, r"(?m)^REPLICA +SESSIONS PLACED +LATE TO SEAL +LATE TO SUM +LATE TO STEP +LATE TO FLUSH$")
            self.assertRegex(text, r"(?m)^ +1 +0 +0\.0 ms +0\.0 ms +0\.0 ms +0\.0 ms$")
            servers[1].stop()
            wait_until(lambda: "did not join" in replicas(servers[0])["why_not"], "the replica that has ended is missed")
            self.assertFalse(replicas(servers[0])["whole"])
            self.assertRegex(status(servers[0]), r"(?m)NOT WHOLE: replica 1 of 2 did not join;")


if __name__ == "__main__":
    unittest.main()
