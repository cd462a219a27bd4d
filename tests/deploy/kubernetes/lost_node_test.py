#!/usr/bin/env python3
"""deploy/kubernetes/lost_node.sh with a kubectl that plays a cluster: what it asks for, in which order, and what it
leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from manifests import KUBERNETES
from programs import run

SCRIPT = KUBERNETES / "lost_node.sh"

# Answers from cluster.json, {"pod lossd-0": {jsonpath: text}} and {"nodes SELECTOR": {"name": text}}, and writes down what
# would change something. A pod that is deleted is another one from then on, unless "deleted pods" says that it stays.
KUBECTL = """#!{python} -SE
import json, os, sys
folder = os.path.dirname(os.path.abspath(__file__))
cluster = json.load(open(folder + "/cluster.json"))
words = [word for word in sys.argv[1:] if not word.startswith("-")]
if words[0] == "lossd":
    words = words[1:]
if words[:2] == ["get", "nodes"]:
    (selector,) = [word.split("=", 1)[1] for word in sys.argv if word.startswith("--selector=")]
    print(cluster["nodes " + selector]["name"])
    sys.exit()
if words[0] == "get":
    path = sys.argv[-1].removeprefix("jsonpath=")
    print(cluster.get(" ".join(words[1:3]), {{}}).get(path, ""), end="")
    sys.exit()
with open(folder + "/changes", "a") as changes:
    print(" ".join(words[:3]), file=changes)
if words[0] == "wait":
    sys.exit(cluster["wait"]["status"])
if words[:2] == ["delete", "pod"] and "deleted pods" not in cluster:
    cluster["pod " + words[2]]["{{.metadata.uid}}"] = "new"
    json.dump(cluster, open(folder + "/cluster.json", "w"))
"""
READY = '{.status.conditions[?(@.type=="Ready")].status}'
# Selectors of the nodes that may have a volume, a line for each alternative.
NODES = (
    '{range .spec.nodeAffinity.required.nodeSelectorTerms[*]}{range .matchExpressions[?(@.operator=="In")]}'
    '{.key} in ({range .values[*]}{@},{end}),{end}{"\\n"}{end}'
)
OWNER = '{.metadata.ownerReferences[?(@.kind=="StatefulSet")].name}'


class LostNode(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="lossd-lost-node-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        program = self.folder / "kubectl"
        program.write_text(KUBECTL.format(python=sys.executable), encoding="utf-8")
        program.chmod(0o755)
        self.cluster: dict[str, dict[str, Any]] = {
            "pod lossd-0": {"{.metadata.uid}": "old", "{.spec.nodeName}": "node-7", OWNER: "lossd"},
            "statefulset lossd": {"{.spec.replicas}": "1"},
            "node node-7": {"{.metadata.name}": "node-7", READY: "Unknown"},
            "node node-8": {"{.metadata.name}": "node-8", READY: "True"},
            "node node-9": {"{.metadata.name}": "node-9", READY: "Unknown"},
            "pvc state-lossd-0": {"{.spec.volumeName}": "pv-1"},
            "pv pv-1": {NODES: "topology.kubernetes.io/zone in (a,b,),\n"},
            "nodes topology.kubernetes.io/zone in (a,b)": {"name": "node/node-9\nnode/node-7\nnode/node-8"},
            "wait": {"status": 0},
        }

    def volume_is_on_the_node(self) -> None:
        """By a label of its own, as drivers of local volumes have it."""
        self.cluster["pv pv-1"][NODES] = "topology.example.com/node in (node-7,),\n"
        self.cluster["nodes topology.example.com/node in (node-7)"] = {"name": "node/node-7"}

    def run_script(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        (self.folder / "cluster.json").write_text(json.dumps(self.cluster), encoding="utf-8")
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "LOSSD_POLL_SECONDS": "0.1"}
        environment["LOSSD_PATIENCE_SECONDS"] = "0"
        return run(SCRIPT, *arguments, input=answer, env=environment)

    def changes(self) -> list[str]:
        file = self.folder / "changes"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def assert_left_alone(self, done: subprocess.CompletedProcess[str], why: str) -> None:
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(why, done.stderr)
        self.assertEqual(self.changes(), [])

    def test_a_pod_of_a_lost_node_starts_on_another_one(self) -> None:
        done = self.run_script("lossd-0", answer="node-7\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.changes(), ["taint node node-7", "delete pod lossd-0", "wait pod/lossd-0"])
        self.assertIn("kubectl taint node node-7 node.kubernetes.io/out-of-service-", done.stderr)

    def test_a_node_that_is_ready_is_left_alone(self) -> None:
        self.cluster["node node-7"][READY] = "True"
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "node-7 is ready")

    def test_nothing_happens_without_the_nodes_name(self) -> None:
        self.assert_left_alone(self.run_script("lossd-0", answer="yes\n"), "nothing was changed")
        self.assert_left_alone(self.run_script("lossd-0"), "nothing was changed")

    def test_a_pod_that_is_not_there(self) -> None:
        self.assert_left_alone(self.run_script("--yes", "lossd-9"), "no pod lossd-9")

    def test_a_volume_of_the_node_itself_is_given_up_only_if_told(self) -> None:
        self.volume_is_on_the_node()
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "--new-volume")
        self.assert_left_alone(self.run_script("--new-volume", "lossd-0", answer="node-7\n"), "nothing was changed")
        done = self.run_script("--new-volume", "lossd-0", answer="node-7\nstate-lossd-0\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(
            self.changes(),
            ["taint node node-7", "delete pvc state-lossd-0", "delete pod lossd-0", "wait pod/lossd-0"],
        )

    def test_a_folder_of_the_node_cannot_follow(self) -> None:
        self.cluster["pv pv-1"] = {"{.spec.hostPath.path}": "/srv/lossd"}
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "--new-volume")

    def test_a_volume_for_any_node_follows(self) -> None:
        self.cluster["pv pv-1"] = {}
        self.assertEqual(self.run_script("--yes", "lossd-0").returncode, 0)

    def test_no_node_that_is_ready_can_have_the_volume(self) -> None:
        self.cluster["node node-8"][READY] = "False"
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "--new-volume")

    def test_a_volume_that_other_nodes_can_have_is_not_deleted_unasked(self) -> None:
        done = self.run_script("--new-volume", "lossd-0", answer="node-7\n")
        self.assert_left_alone(done, "without --new-volume it keeps its checkpoints")

    def test_a_pod_that_waits_for_a_node_keeps_its_claim_unless_told(self) -> None:
        del self.cluster["pod lossd-0"]["{.spec.nodeName}"]
        self.assert_left_alone(self.run_script("--new-volume", "lossd-0"), "nothing was changed")
        done = self.run_script("--new-volume", "lossd-0", answer="state-lossd-0\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.changes(), ["delete pvc state-lossd-0", "delete pod lossd-0", "wait pod/lossd-0"])

    def test_a_pod_that_nobody_would_make_anew_is_left_alone(self) -> None:
        self.cluster["statefulset lossd"]["{.spec.replicas}"] = "0"
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "does not ask for lossd-0")
        self.cluster["statefulset lossd"] = {"{.spec.ordinals.start}": "1", "{.spec.replicas}": "2"}
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "does not ask for lossd-0")
        del self.cluster["statefulset lossd"]
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "it is gone")
        del self.cluster["pod lossd-0"][OWNER]
        self.assert_left_alone(self.run_script("--yes", "lossd-0"), "no StatefulSet made lossd-0")

    def test_a_pod_that_is_not_made_anew_is_not_waited_for_without_end(self) -> None:
        self.cluster["deleted pods"] = {"stay": True}
        done = self.run_script("--yes", "lossd-0")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("was not made anew", done.stderr)

    def test_the_way_back_is_told_also_if_the_pod_does_not_become_ready(self) -> None:
        self.cluster["wait"]["status"] = 1
        done = self.run_script("--yes", "lossd-0")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("kubectl taint node node-7 node.kubernetes.io/out-of-service-", done.stderr)
        self.assertIn("lossd-0 is not ready yet", done.stderr)

    def test_a_node_that_was_deleted_takes_no_taint(self) -> None:
        del self.cluster["node node-7"]
        self.assertEqual(self.run_script("--yes", "lossd-0").returncode, 0)
        self.assertEqual(self.changes(), ["delete pod lossd-0", "wait pod/lossd-0"])

    def test_mistyped_arguments_change_nothing(self) -> None:
        for arguments in ([], ["--force", "lossd-0"], ["lossd-0", "lossd-1"], ["--namespace"]):
            self.assertEqual(self.run_script(*arguments).returncode, 2, arguments)
        self.assertEqual(self.changes(), [])


if __name__ == "__main__":
    unittest.main()
