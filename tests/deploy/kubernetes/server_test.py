#!/usr/bin/env python3
"""The real lossd, started as the pods of a rendered overlay start it: their arguments and lossd.json, where volumes are
folders here and ports are free ones. Then the probes ask, Prometheus reads, a trainer connects, the pod is deleted.

usage: server_test.py LOSSD LOSSCTL   with tests/deploy and tests/support in PYTHONPATH
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import unittest
import urllib.request
from pathlib import Path

from certificates import Authority
from lossd_server import LossdServer, free_port
from manifests import (
    GROUPS,
    KUBERNETES,
    OVERLAYS,
    arguments_in,
    container,
    of_kind,
    overlay,
    pod_spec,
    pods,
    render,
    server_config,
    workloads,
)
from programs import run
from weights import write_weights

LOSSD, LOSSCTL = sys.argv[1:3]
del sys.argv[1:3]

TOKENS = {
    "read-only": "reads-only-what-is-there-1",
    "trainer": "sends-hidden-states-2",
    "admin": "deletes-and-drains-3",
}
# A port, in whose place comes any that is free.
FREE_PORT = re.compile(r"(?<=:)\d+$")


def make_certificates(folder: Path) -> None:
    """What cert-manager would put into the secret, for the names that its component asks for, and a trainer's."""
    (asked,) = (
        found["spec"]
        for found in of_kind(render(KUBERNETES / "components/cert-manager"), "Certificate")
        if found["spec"]["secretName"] == "lossd-tls"
    )
    authority = Authority(folder, suffix=".crt")
    authority.issue("tls", ",".join(f"DNS:{name}" for name in asked["dnsNames"]))
    authority.issue("trainer", "DNS:trainer")
    for name in ("tls", "trainer"):
        authority.key(name).chmod(0o440)


class Pod(LossdServer):
    """A process instead of a container. `heads` take the place of those in its configuration."""

    def __init__(self, name: str, heads: list[dict] | None = None) -> None:
        self.objects = overlay(name)
        (self.workload,) = workloads(self.objects)
        super().__init__(LOSSD, cwd="/", env=self.environment())
        self.root = self.folder
        for mount in container(self.workload)["volumeMounts"]:
            self.inside(mount["mountPath"]).mkdir(parents=True)
        make_certificates(self.inside("/etc/lossd-tls"))
        tokens = "".join(f"{role} {token} {role}-of-the-test\n" for role, token in TOKENS.items())
        self.inside("/etc/lossd-tokens/tokens").write_text(tokens, encoding="utf-8")
        self.inside("/etc/lossd-tokens/operator").write_text(TOKENS["admin"], encoding="utf-8")
        for file in ("tokens", "operator"):
            self.inside(f"/etc/lossd-tokens/{file}").chmod(0o440)
        if self.inside("/etc/lossd-group").exists():
            self.inside("/etc/lossd-group/token").write_text("what-nodes-of-the-test-know", encoding="utf-8")
            self.inside("/etc/lossd-group/token").chmod(0o440)  # the kubelet adds fsGroup
        config = server_config(self.objects, self.workload)
        if heads is not None:
            config["heads"] = heads
        self.inside("/etc/lossd/lossd.json").write_text(json.dumps(self._moved(config)), encoding="utf-8")
        self.begin()

    def inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _moved(self, config: dict) -> dict:
        """With paths below the root, and ports that are free."""
        moved = {}
        for key, value in config.items():
            if isinstance(value, str) and value.startswith("/"):
                value = str(self.inside(value))
            if key.endswith("listen"):
                value = ",".join(self._moved_address(address) for address in value.split(","))
            moved[key] = value
        return moved

    def _moved_address(self, address: str) -> str:
        if address.startswith("unix:"):
            return f"unix:{self.inside(address.removeprefix('unix:'))}"
        return FREE_PORT.sub("0", address)

    def flags(self) -> list[str]:
        arguments = [re.sub("=/", f"={self.root}/", argument) for argument in self.arguments()]
        return [*arguments, f"--port_file={self.root}/ports.json"]

    def await_serving(self) -> dict[str, int]:
        self.ports = super().await_serving()
        return self.ports

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "2"}

    def arguments(self) -> list[str]:
        return container(self.workload)["args"]

    def probe(self, name: str) -> int:
        """As the kubelet does: exit code 0 is success."""
        probe = container(self.workload)[name]["grpc"]
        port = {50052: self.ports["health"], 50051: self.ports["grpc"]}[probe["port"]]
        command = [LOSSCTL, "health", "--server", f"127.0.0.1:{port}", "--service", probe.get("service", "")]
        return run(*command).returncode

    def lossctl(
        self, *arguments: str, certificate: bool = True, token: str = "", name: str = "localhost"
    ) -> subprocess.CompletedProcess:
        """`name`: what the trainer knows the server by."""
        folder = self.inside("/etc/lossd-tls")
        command = [LOSSCTL, *arguments, "--server", f"localhost:{self.ports['grpc']}", "--timeout", "20"]
        command += ["--tls_ca", f"{folder}/ca.crt", "--tls_server_name", name]
        if certificate:
            command += ["--tls_certificate", f"{folder}/trainer.crt", "--tls_key", f"{folder}/trainer.key"]
        if token:
            file = self.root / "token"
            file.write_text(token, encoding="utf-8")
            command += ["--token_file", str(file)]
        return run(*command)

    def execute(self, *arguments: str) -> subprocess.CompletedProcess:
        """As kubectl exec does: what the container's environment says, and nothing else."""
        environment = {}
        for entry in container(self.workload)["env"]:
            value = entry.get("value", "")
            environment[entry["name"]] = self._moved_address(value) if value.startswith("unix:") else value
            if value.startswith("/"):
                environment[entry["name"]] = str(self.inside(value))
        return run(LOSSCTL, *arguments, env=environment)

    def delete(self) -> int:
        """SIGTERM, and the exit status within the grace period."""
        self.signal(signal.SIGTERM)
        return self.wait(pod_spec(self.workload)["terminationGracePeriodSeconds"])


class PodOfAGroup(Pod):
    """One of those that an overlay of a group makes, on a CPU here, and all of them on one host."""

    def __init__(self, name: str, index: int, leader_port: int) -> None:
        self.index, self.leader_port = index, leader_port
        super().__init__(name, heads=[{"name": "lm_head", "vocab_size": 64, "hidden_size": 16}])

    def _moved(self, config: dict) -> dict:
        return super()._moved({**config, "devices": "cpu", "staging_bytes": 1 << 28})

    def port_file(self) -> Path:
        return self.folder / (f"ports.json.{self.index}" if self.index > 0 else "ports.json")

    def environment(self) -> dict[str, str]:
        """With what the controller of LeaderWorkerSets adds."""
        environment = {"OMP_NUM_THREADS": "1"}
        _, labels = pods(self.workload)[self.index]
        if self.workload["kind"] == "LeaderWorkerSet":
            environment["LWS_GROUP_SIZE"] = str(self.workload["spec"]["leaderWorkerTemplate"]["size"])
            environment["LWS_WORKER_INDEX"] = labels["leaderworkerset.sigs.k8s.io/worker-index"]
            environment["LWS_LEADER_ADDRESS"] = "localhost"
        return environment

    def arguments(self) -> list[str]:
        """A flag that is given twice has the last value."""
        _, labels = pods(self.workload)[self.index]
        here = ["--collective_interface=lo", f"--group_leader=localhost:{self.leader_port}"]
        return [*arguments_in(self.workload, labels), *here]


class PodOfASet(Pod):
    """A replica, on a CPU here, and all of them on one host, whose name tells no place."""

    def __init__(self, name: str, index: int, leader_port: int) -> None:
        self.index, self.leader_port = index, leader_port
        super().__init__(name, heads=[{"name": "lm_head", "vocab_size": 64, "hidden_size": 16}])

    def _moved(self, config: dict) -> dict:
        return super()._moved({**config, "device": "cpu", "staging_bytes": 1 << 28})

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    def arguments(self) -> list[str]:
        """A flag that is given twice has the last value."""
        _, labels = pods(self.workload)[self.index]
        here = ["--collective_interface=lo", f"--replica={self.index}"]
        return [*arguments_in(self.workload, labels), *here, f"--replica_leader=localhost:{self.leader_port}"]


class PodOfTheCpuOverlay(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.pod = Pod("cpu")
        cls.addClassCleanup(cls.pod.close)
        cls.pod.await_serving()

    def test_all_probes_succeed(self) -> None:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            self.assertEqual(self.pod.probe(probe), 0, probe)

    def test_metrics_can_be_read(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.pod.ports['metrics']}/metrics") as answer:
            self.assertIn("lossd_heads 1\n", answer.read().decode())

    def test_only_a_known_trainer_gets_in(self) -> None:
        self.assertIn("lm_head", self.pod.lossctl("head", "list", token=TOKENS["trainer"]).stdout)
        self.assertNotEqual(self.pod.lossctl("head", "list", token=TOKENS["trainer"], certificate=False).returncode, 0)
        self.assertNotEqual(self.pod.lossctl("head", "list").returncode, 0)
        self.assertNotEqual(self.pod.lossctl("head", "list", token="nobody-has-this-token-4").returncode, 0)

    def test_a_pod_is_who_it_says_by_each_of_its_names_and_by_no_other(self) -> None:
        pods = ("lossd-0.lossd", "lossd-11.lossd", "lossd-main-0.lossd", "lossd-draft-1.lossd")
        for name in (
            "localhost",
            *(f"{pod}.lossd.{suffix}" for pod in pods for suffix in ("svc", "svc.cluster.local")),
        ):
            told = self.pod.lossctl("status", token=TOKENS["trainer"], name=name)
            self.assertEqual(told.returncode, 0, told.stderr)
        for name in ("lossd-0.another.lossd.svc", "lossd.svc", "lossd-0.lossd"):
            self.assertNotEqual(self.pod.lossctl("status", token=TOKENS["trainer"], name=name).returncode, 0, name)

    def test_lossctl_in_the_pod_needs_no_options(self) -> None:
        told = self.pod.execute("status", "--json")
        self.assertEqual(told.returncode, 0, told.stderr)
        self.assertEqual([head["name"] for head in json.loads(told.stdout)["heads"]], ["lm_head"])
        checked = self.pod.execute("health", "--server", f"127.0.0.1:{self.pod.ports['health']}")
        self.assertEqual(checked.returncode, 0, checked.stderr)

    def test_lossctl_says_so_where_there_is_health_alone(self) -> None:
        told = self.pod.execute("head", "list", "--server", f"127.0.0.1:{self.pod.ports['health']}")
        self.assertNotEqual(told.returncode, 0)
        self.assertIn("does not serve this call", told.stderr)

    def test_the_heads_of_the_configuration_are_there(self) -> None:
        listed = json.loads(self.pod.lossctl("head", "list", "--json", token=TOKENS["read-only"]).stdout)
        config = server_config(self.pod.objects, self.pod.workload)
        wanted = {(h["name"], h["vocab_size"], h["hidden_size"]) for h in config["heads"]}
        self.assertEqual({(h["name"], h["vocab_size"], h["hidden_size"]) for h in listed["heads"]}, wanted)


class DeletedPod(unittest.TestCase):
    def test_the_next_pod_goes_on_where_it_stopped(self) -> None:
        # A head of a size that is quickly on the disk.
        pod = Pod("cpu", heads=[{"name": "lm_head", "vocab_size": 64, "hidden_size": 16}])
        self.addCleanup(pod.close)
        pod.await_serving()
        write_weights(pod.root / "weights.safetensors", 64, 16)
        loaded = pod.lossctl("head", "load", "lm_head", str(pod.root / "weights.safetensors"), token=TOKENS["trainer"])
        self.assertEqual(loaded.returncode, 0, loaded.stderr)
        before = json.loads(pod.lossctl("status", "--json", token=TOKENS["admin"]).stdout)
        self.assertEqual(pod.delete(), 0, pod.log())
        pod.start()
        after = json.loads(pod.lossctl("status", "--json", token=TOKENS["admin"]).stdout)
        self.assertEqual(after["incarnation"], before["incarnation"], "it is the same server to its clients")
        self.assertEqual(after["heads"][0]["weight_version"], before["heads"][0]["weight_version"])
        self.assertGreater(after["heads"][0]["weight_version"], 0)
        self.assertEqual(pod.probe("readinessProbe"), 0)


def start_all(test: unittest.TestCase, kind: type, name: str) -> list:
    """Every pod of an overlay."""
    port, started = free_port(), []
    for index in range(len(pods(workloads(overlay(name))[0]))):
        started.append(kind(name, index, port))
        test.addCleanup(started[-1].close)
    for pod in started:
        pod.await_serving()
    return started


class ReplicasOfPods(unittest.TestCase):
    def test_pods_meet_and_all_have_the_head(self) -> None:
        first, second = start_all(self, PodOfASet, "replicas/stateful-set")
        for pod in (first, second):
            told = json.loads(pod.lossctl("status", "--json", token=TOKENS["admin"]).stdout)
            self.assertEqual(
                (told["replicas"]["name"], told["replicas"]["whole"]), ("lossd-replicas", True), told["replicas"]
            )
            self.assertEqual([head["name"] for head in told["heads"]], ["lm_head"])
            self.assertEqual(pod.probe("readinessProbe"), 0)
        self.assertEqual(second.delete(), 0, second.log())

        def whole() -> bool:
            return json.loads(first.lossctl("status", "--json", token=TOKENS["admin"]).stdout)["replicas"]["whole"]

        first.wait_until(lambda: not whole(), "the replica that has ended is missed")
        self.assertEqual(first.probe("readinessProbe"), 0, "losses and chunks go on")


class GroupsOfPods(unittest.TestCase):
    def test_pods_find_each_other_are_ready_together_and_end_together(self) -> None:
        for name in GROUPS:
            with self.subTest(name):
                group = self.started(name)
                leader, *others = group
                told = json.loads(leader.lossctl("status", "--json", token=TOKENS["admin"]).stdout)
                self.assertEqual(len(told["ranks"]), len(group), told)
                for pod in group:
                    self.assertEqual(
                        [pod.probe(probe) for probe in ("startupProbe", "livenessProbe", "readinessProbe")], [0] * 3
                    )
                self.assertEqual(
                    [other.ports["grpc"] for other in others], [0] * len(others), "the leader alone serves"
                )
                # Any of them is deleted: all of them drain.
                self.assertEqual(others[-1].delete(), 0, others[-1].log())
                for pod in group[:-1]:
                    self.assertEqual(pod.wait(), 0, pod.log())

    def started(self, name: str) -> list[PodOfAGroup]:
        return start_all(self, PodOfAGroup, name)


class Configurations(unittest.TestCase):
    def test_every_key_and_argument_is_a_flag(self) -> None:
        # --help goes to standard error or output, as Abseil sees fit.
        told = run(LOSSD, "--help")
        flags = set(re.findall(r"--(\w+)", told.stdout + told.stderr))
        self.assertIn("drain_timeout", flags)
        for name in OVERLAYS:
            for workload in workloads(overlay(name)):
                self.assertLessEqual(set(server_config(overlay(name), workload)) - {"heads"}, flags, name)
                arguments = {re.match(r"--(\w+)=", argument)[1] for argument in container(workload)["args"]}
                self.assertLessEqual(arguments, flags, name)


if __name__ == "__main__":
    unittest.main()
