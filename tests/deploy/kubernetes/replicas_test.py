#!/usr/bin/env python3
"""Overlays whose servers hold replicas of the same heads: each knows its place, they meet, and no other set gets at them."""

from __future__ import annotations

import itertools
import re
import textwrap
import unittest
from collections.abc import Iterator

import yaml
from manifests import (
    KUBERNETES,
    OVERLAYS,
    REPLICAS,
    REPOSITORY,
    Object,
    arguments_in,
    container,
    installed,
    is_replica,
    matches,
    of_kind,
    overlay,
    pod_labels,
    pod_spec,
    pods,
    render,
    render_mine,
    serves,
    workloads,
)
from network import Pod, may_connect

PORTS = (50054, 32768, 60999)


def flags_in(workload: Object, labels: dict[str, str]) -> dict[str, str]:
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments_in(workload, labels))


def patches_of_the_documentation() -> list[Object]:
    """Those that change how many replicas there are, of the StatefulSet first, each as a kustomization has them."""
    page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")
    found = re.findall(r"^( *)patches:\n((?:\1.*\n)+)", page, re.MULTILINE)
    return [
        yaml.safe_load(textwrap.dedent(f"{indent}patches:\n{text}"))
        for indent, text in found
        if "LOSSD_REPLICAS" in text
    ]


class Replicas(unittest.TestCase):
    where = ""

    def each(self) -> Iterator[tuple[tuple[Object, ...], Object]]:
        for name in REPLICAS:
            (workload,) = workloads(overlay(name))
            self.where = f"overlay {name}: "
            yield installed(name), workload

    def _formatMessage(self, msg: str | None, standardMsg: str) -> str:  # noqa: N802, N803
        return self.where + super()._formatMessage(msg, standardMsg)

    def test_no_other_overlay_is_one_of_replicas(self) -> None:
        for name in OVERLAYS:
            for workload in workloads(overlay(name)):
                self.assertEqual(is_replica(workload), name in REPLICAS, name)

    def test_every_replica_knows_its_place(self) -> None:
        for _, workload in self.each():
            self.assert_places(workload, 2)

    def assert_places(self, workload: Object, replicas: int) -> None:
        self.assertEqual(workload["spec"]["replicas"], replicas)
        source = "lws" if workload["kind"] == "LeaderWorkerSet" else "stateful_set"
        for _, labels in pods(workload):
            flags = flags_in(workload, labels)
            self.assertEqual((flags["replica"], flags["replicas"]), (source, str(replicas)))
            self.assertEqual(flags["replica_set"], labels["app.kubernetes.io/instance"])

    def test_the_patches_of_the_documentation_change_how_many_there_are(self) -> None:
        for name, patches in zip(REPLICAS, reversed(patches_of_the_documentation()), strict=True):
            self.where = f"{name}: "
            (workload,) = workloads(render_mine(name, **patches))
            self.assert_places(workload, 4)
            if workload["kind"] == "LeaderWorkerSet":
                update = workload["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
                self.assertEqual(update["partition"], 4, "none is updated by itself")

    def test_two_sets_of_one_namespace_refuse_each_other(self) -> None:
        # As the documentation says: another suffix, and another label, which is the name of the set.
        for name in REPLICAS:
            mine = [{"includeSelectors": True, "pairs": {"app.kubernetes.io/instance": "b"}}]
            (first,), (second,) = workloads(overlay(name)), workloads(render_mine(name, nameSuffix="-b", labels=mine))
            sets = {flags_in(workload, pods(workload)[0][1])["replica_set"] for workload in (first, second)}
            self.assertEqual(len(sets), 2)

    def test_replicas_reach_each_other_and_no_other_set(self) -> None:
        labels = [{"includeSelectors": True, "pairs": {"app.kubernetes.io/instance": "b"}}]
        other_server = Pod(pod_labels(workloads(overlay("cpu"))[0]))
        for name, other in itertools.product(REPLICAS, REPLICAS):
            self.where = f"{name} beside {other}: "
            second = render_mine(other, nameSuffix="-b", labels=labels)
            objects = installed(name) + second
            (workload,), (beside,) = workloads(overlay(name)), workloads(second)
            members, strangers = [Pod(p) for _, p in pods(workload)], [Pod(p) for _, p in pods(beside)]
            for port in PORTS:
                for some in (members, strangers):
                    for one, two in itertools.permutations(some, 2):
                        self.assertTrue(may_connect(objects, one, two, port))
                for member, stranger in itertools.product(members, [*strangers, other_server]):
                    self.assertFalse(may_connect(objects, member, stranger, port))
                    self.assertFalse(may_connect(objects, stranger, member, port))

    def test_trainers_reach_every_replica_and_none_of_its_other_ports(self) -> None:
        trainer = Pod({"lossd-client": "true"})
        for objects, workload in self.each():
            serving = [labels for _, labels in pods(workload) if serves(workload, labels)]
            self.assertEqual(len(serving), workload["spec"]["replicas"])
            for labels in serving:
                self.assertTrue(may_connect(objects, trainer, Pod(labels), 50051))
                for port in PORTS:
                    self.assertFalse(may_connect(objects, trainer, Pod(labels), port))

    def test_one_name_has_all_that_serve(self) -> None:
        for objects, workload in self.each():
            (service,) = (s for s in of_kind(objects, "Service") if s["metadata"]["name"].startswith("lossd-set"))
            self.assertEqual(service["spec"]["clusterIP"], "None")
            self.assertIs(service["spec"]["publishNotReadyAddresses"], True, "who waits for a replica serves losses")
            for name, labels in pods(workload):
                selected = matches({"matchLabels": service["spec"]["selector"]}, labels)
                self.assertEqual(selected, serves(workload, labels), name)

    def test_a_session_is_opened_by_a_name_that_the_certificate_has(self) -> None:
        certificates = of_kind(render(KUBERNETES / "components/cert-manager"), "Certificate")
        (names,) = (c["spec"]["dnsNames"] for c in certificates if c["spec"]["secretName"] == "lossd-tls")
        for objects, workload in self.each():
            for pod, labels in pods(workload):
                host = flags_in(workload, labels)["advertise_host"]
                own, _, domain = host.partition(".")
                self.assertEqual(own, pod)
                self.assertIn(f"*.{domain}", names)
                service, namespace, _ = domain.split(".")
                self.assertEqual(namespace, "lossd")
                self.assertIn(service, [s["metadata"]["name"] for s in of_kind(objects, "Service")])

    def test_the_secret_of_a_set_is_a_file_of_its_user_alone(self) -> None:
        for _, workload in self.each():
            (file,) = (a for a in container(workload)["args"] if a.startswith("--group_token_file="))
            folder = file.partition("=")[2].rpartition("/")[0]
            (mount,) = (m for m in container(workload)["volumeMounts"] if m["mountPath"] == folder)
            (volume,) = (v for v in pod_spec(workload)["volumes"] if v["name"] == mount["name"])
            self.assertEqual(volume["secret"], {"secretName": "lossd-group", "defaultMode": 0o400})

    def test_none_waits_for_another_to_be_ready(self) -> None:
        for _, workload in self.each():
            if workload["kind"] == "StatefulSet":
                self.assertEqual(workload["spec"]["podManagementPolicy"], "Parallel")
            else:
                self.assertEqual(workload["spec"]["startupPolicy"], "LeaderCreated")


if __name__ == "__main__":
    unittest.main()
