#!/usr/bin/env python3
"""What no schema knows: that pods are admitted by the restricted profile, that a drain fits, that what names each other
fits together, and that nothing lets in or evicts more than it should. Each for every overlay."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from collections.abc import Iterator
from pathlib import Path

import yaml
from manifests import (
    GROUPS,
    KUBERNETES,
    OVERLAYS,
    REPOSITORY,
    Object,
    arguments_in,
    claims,
    container,
    installed,
    is_group,
    is_replica,
    matches,
    of_kind,
    overlay,
    overlay_with_components,
    pod_labels,
    pod_spec,
    pods,
    quantity,
    render,
    render_mine,
    seconds,
    server_config,
    serves,
    workloads,
)
from network import Pod, may_connect

# What a process needs beside heads, workspace and staging: code, connections, memory that it keeps for chunks to come.
PROCESS_BYTES = 2 << 30
# Volumes that the restricted profile admits, of those that there are here.
ADMITTED_VOLUMES = {"configMap", "emptyDir", "secret"}
# What tells Argo CD and Flux to leave an object alone that its manifests no longer have.
UNPRUNED = {"argocd.argoproj.io/sync-options": "Prune=false", "kustomize.toolkit.fluxcd.io/prune": "disabled"}


def patches_of_the_documentation(word: str) -> list[Object]:
    """Those with the word in them, each as a kustomization has them."""
    page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")
    found = re.findall(r"^( *)patches:\n((?:\1.*\n)+)", page, re.MULTILINE)
    return [yaml.safe_load(textwrap.dedent(f"{indent}patches:\n{text}")) for indent, text in found if word in text]


class Policy(unittest.TestCase):
    where = ""

    def each(self, overlays: tuple[str, ...] = OVERLAYS) -> Iterator[tuple[tuple[Object, ...], Object]]:
        """(objects, what makes the pods) of every overlay and the namespace; what fails until the next names it."""
        for name in overlays:
            for workload in workloads(overlay(name)):
                self.where = f"{workload['metadata']['name']} of overlay {name}: "
                yield installed(name), workload

    def _formatMessage(self, msg: str | None, standardMsg: str) -> str:  # noqa: N802, N803
        return self.where + super()._formatMessage(msg, standardMsg)

    def each_group(self) -> Iterator[tuple[tuple[Object, ...], Object]]:
        for objects, workload in self.each(GROUPS):
            self.assertTrue(is_group(workload))
            yield objects, workload

    def port_of(self, workload: Object, name: str) -> int:
        (port,) = (p["containerPort"] for p in container(workload)["ports"] if p["name"] == name)
        return port

    # The restricted profile

    def test_pods_are_of_the_restricted_profile(self) -> None:
        for _, workload in self.each():
            spec = pod_spec(workload)
            security, own = spec["securityContext"], container(workload)["securityContext"]
            self.assertIs(security["runAsNonRoot"], True)
            self.assertGreater(security["runAsUser"], 0)
            self.assertGreater(security["runAsGroup"], 0)
            self.assertEqual(security["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertIs(own["allowPrivilegeEscalation"], False)
            self.assertIs(own["privileged"], False)
            self.assertEqual(own["capabilities"], {"drop": ["ALL"]})
            self.assertFalse({"hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"} & set(spec))
            self.assertFalse(any("hostPort" in port for port in container(workload)["ports"]))
            for volume in spec["volumes"]:
                (kind,) = set(volume) - {"name"}
                self.assertIn(kind, ADMITTED_VOLUMES, volume["name"])

    def test_the_namespace_admits_nothing_else(self) -> None:
        for name in OVERLAYS:
            (namespace,) = of_kind(installed(name), "Namespace")
            self.assertEqual(namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "restricted")

    def test_everything_is_in_the_namespace(self) -> None:
        for name in OVERLAYS:
            for manifest in installed(name):
                if manifest["kind"] not in ("Namespace", "PriorityClass"):
                    self.assertEqual(manifest["metadata"].get("namespace"), "lossd", manifest["kind"])

    def test_deleting_an_overlay_leaves_namespace_claims_and_what_others_use(self) -> None:
        for name in OVERLAYS:
            mine = overlay(name) + overlay_with_components(name)
            kinds = {"Namespace", "PersistentVolumeClaim", "PersistentVolume", "PriorityClass", "Secret"}
            self.assertFalse({manifest["kind"] for manifest in mine} & kinds, name)
            shared = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in render(KUBERNETES / "namespace")}
            self.assertFalse({(manifest["kind"], manifest["metadata"]["name"]) for manifest in mine} & shared, name)

    def test_the_root_file_system_is_read_only_and_what_is_written_is_a_volume(self) -> None:
        for objects, workload in self.each():
            self.assertIs(container(workload)["securityContext"]["readOnlyRootFilesystem"], True)
            volumes = {v["name"]: v for v in pod_spec(workload)["volumes"]}
            volumes |= {t["metadata"]["name"]: t for t in claims(workload)["volumeClaimTemplates"]}
            mounts = {m["mountPath"]: m for m in container(workload)["volumeMounts"]}
            self.assertEqual({m["name"] for m in mounts.values()}, set(volumes))
            checkpoints = server_config(objects, workload)["checkpoint_dir"]
            (state,) = (m for path, m in mounts.items() if checkpoints.startswith(path + "/"))
            self.assertIn("spec", volumes[state["name"]], "checkpoints are on a claimed volume")
            self.assertEqual(volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"], "Memory")
            for path in ("/run/lossd", "/tmp"):
                self.assertIn("sizeLimit", volumes[mounts[path]["name"]]["emptyDir"])

    def test_no_token_of_kubernetes_is_in_the_pod(self) -> None:
        for objects, workload in self.each():
            account = pod_spec(workload)["serviceAccountName"]
            (found,) = (a for a in of_kind(objects, "ServiceAccount") if a["metadata"]["name"] == account)
            self.assertIs(found["automountServiceAccountToken"], False)
            self.assertIs(pod_spec(workload)["automountServiceAccountToken"], False)

    def test_no_secret_is_written_down(self) -> None:
        for name in OVERLAYS:
            self.assertEqual(of_kind(overlay(name), "Secret"), [])

    # The server's configuration

    def test_everything_that_leaves_the_pod_is_guarded(self) -> None:
        for objects, workload in self.each():
            config = server_config(objects, workload)
            secrets = {v["name"]: v["secret"] for v in pod_spec(workload)["volumes"] if "secret" in v}
            mounts = {m["mountPath"]: m["name"] for m in container(workload)["volumeMounts"]}
            for flag, secret, key in (
                ("tls_certificate", "lossd-tls", "tls.crt"),
                ("tls_key", "lossd-tls", "tls.key"),
                ("tls_client_ca", "lossd-tls", "ca.crt"),
                ("tokens", "lossd-tokens", "tokens"),
            ):
                folder, _, file = config[flag].rpartition("/")
                self.assertEqual(file, key)
                self.assertEqual(secrets[mounts[folder]]["secretName"], secret)
                self.assertEqual(secrets[mounts[folder]]["defaultMode"], 0o440, "not for everybody to read")
            self.assertNotIn("insecure", config)

    def test_nothing_is_mounted_by_sub_path(self) -> None:
        # Such a mount never changes: a rotated certificate would not arrive.
        for _, workload in self.each():
            for mount in container(workload)["volumeMounts"]:
                self.assertFalse({"subPath", "subPathExpr"} & set(mount), mount["mountPath"])

    def test_ports_are_those_of_the_configuration(self) -> None:
        for objects, workload in self.each():
            config = server_config(objects, workload)
            for flag, port in (("listen", "grpc"), ("metrics_listen", "metrics"), ("health_listen", "health")):
                self.assertEqual(config[flag].split(",")[0], f"0.0.0.0:{self.port_of(workload, port)}")

    def test_lossctl_in_the_pod_finds_its_socket_and_a_token(self) -> None:
        for objects, workload in self.each():
            given = {entry["name"]: entry.get("value") for entry in container(workload)["env"]}
            self.assertIn(given["LOSSD_SERVER"], server_config(objects, workload)["listen"].split(",")[1:])
            mounts = {mount["mountPath"]: mount["name"] for mount in container(workload)["volumeMounts"]}
            self.assertEqual(mounts[given["LOSSD_SERVER"].removeprefix("unix:").rpartition("/")[0]], "run")
            self.assertEqual(mounts[given["LOSSD_TOKEN_FILE"].rpartition("/")[0]], "tokens")

    def test_a_drained_pod_goes_on_where_it_stopped(self) -> None:
        for objects, workload in self.each():
            config = server_config(objects, workload)
            self.assertIs(config["restore"], True)
            grace = pod_spec(workload)["terminationGracePeriodSeconds"]
            self.assertGreaterEqual(grace, seconds(config["drain_timeout"]) + 30)

    def test_a_drain_that_is_allowed_is_no_alert(self) -> None:
        text = (REPOSITORY / "deploy/prometheus/rules/lossd.rules.yml").read_text(encoding="utf-8")
        (alert,) = (
            rule
            for group in yaml.safe_load(text)["groups"]
            for rule in group["rules"]
            if rule.get("alert") == "LossdDrainingTooLong"
        )
        for objects, workload in self.each():
            allowed = seconds(server_config(objects, workload)["drain_timeout"])
            self.assertGreater(seconds(alert["for"]), allowed)

    def test_memory_fits_the_limit(self) -> None:
        for objects, workload in self.each():
            config = server_config(objects, workload)
            processes = int(container(workload)["resources"]["limits"].get("nvidia.com/gpu", "1"))
            needed = config["staging_bytes"] + processes * PROCESS_BYTES
            for volume in pod_spec(workload)["volumes"]:
                if volume.get("emptyDir", {}).get("medium") == "Memory":
                    needed += quantity(volume["emptyDir"]["sizeLimit"])
            if config.get("device") == "cpu":
                needed += config["memory_limit_bytes"]
            else:  # the second copy of the weights, what heads keep page-locked
                needed += sum(2 * head["vocab_size"] * head["hidden_size"] for head in config["heads"])
                needed += processes << 30
            self.assertLessEqual(needed, quantity(container(workload)["resources"]["limits"]["memory"]))

    def test_volumes_hold_two_checkpoints(self) -> None:
        # One is written beside the last: weights, dW and the two moments of Adam.
        for objects, workload in self.each():
            (claim,) = claims(workload)["volumeClaimTemplates"]
            heads = server_config(objects, workload)["heads"]
            needed = 2 * sum((2 + 4 + 8) * head["vocab_size"] * head["hidden_size"] for head in heads)
            self.assertLess(needed, quantity(claim["spec"]["resources"]["requests"]["storage"]))

    def test_heads_have_names_of_their_own(self) -> None:
        names = [
            head["name"]
            for workload in of_kind(overlay("multi-head"), "StatefulSet")
            for head in server_config(overlay("multi-head"), workload)["heads"]
        ]
        self.assertGreater(len(names), 1)
        self.assertEqual(len(names), len(set(names)))

    # Probes, resources, disruption

    def test_probes_ask_the_health_port(self) -> None:
        for _, workload in self.each():
            health = self.port_of(workload, "health")
            services = {}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                services[probe] = container(workload)[probe]["grpc"].get("service", "")
                self.assertEqual(container(workload)[probe]["grpc"]["port"], health)
            self.assertEqual(services, {"startupProbe": "", "livenessProbe": "liveness", "readinessProbe": ""})

    def test_probes_are_patient(self) -> None:
        for _, workload in self.each():
            start, live = container(workload)["startupProbe"], container(workload)["livenessProbe"]
            self.assertGreaterEqual(
                start["periodSeconds"] * start["failureThreshold"], 30 * 60, "restoring a checkpoint takes time"
            )
            self.assertGreaterEqual(live["periodSeconds"] * live["failureThreshold"], 60)

    def test_resources_are_said(self) -> None:
        for _, workload in self.each():
            resources = container(workload)["resources"]
            self.assertEqual(
                resources["requests"]["memory"], resources["limits"]["memory"], "else the node may run out first"
            )
            self.assertIn("cpu", resources["requests"])
            self.assertNotIn("cpu", resources["limits"], "work that needs more for a moment would wait")

    def test_pods_are_of_the_class_guaranteed_with_the_component_of_that_name(self) -> None:
        for name in OVERLAYS:
            for workload in workloads(overlay_with_components(name)):
                resources = container(workload)["resources"]
                self.assertEqual(resources["requests"], resources["limits"])
                self.assertLessEqual({"cpu", "memory"}, set(resources["limits"]))
                self.assertTrue(resources["limits"]["cpu"].isdigit(), "cores of its own are whole ones")

    def test_pods_have_the_gpus_that_their_server_takes(self) -> None:
        for objects, workload in self.each():
            config = server_config(objects, workload)
            resources, spec = container(workload)["resources"], pod_spec(workload)
            if config.get("device") == "cpu":
                self.assertNotIn("nvidia.com/gpu", resources["limits"])
                continue
            self.assertEqual(resources["limits"]["nvidia.com/gpu"], resources["requests"]["nvidia.com/gpu"])
            if is_group(workload):
                self.assertEqual(config["devices"], "all")
                self.assertGreater(int(resources["limits"]["nvidia.com/gpu"]), 1)
            else:
                self.assertEqual(config["device"], "cuda:0")
                self.assertEqual(resources["limits"]["nvidia.com/gpu"], "1")
            self.assertIn({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, spec["tolerations"])
            self.assertTrue(container(workload)["image"].endswith("-cuda"))

    def test_images_have_a_version(self) -> None:
        version = re.search(
            r"project\(lossd VERSION ([\d.]+)", (REPOSITORY / "CMakeLists.txt").read_text(encoding="utf-8")
        )
        for _, workload in self.each():
            tag = container(workload)["image"].rpartition(":")[2]
            self.assertRegex(tag, rf"^{re.escape(version[1])}-(cpu|cuda)$")

    def test_nothing_evicts_or_updates_a_pod_by_itself(self) -> None:
        for objects, workload in self.each():
            labels = pod_labels(workload)
            (budget,) = (b for b in of_kind(objects, "PodDisruptionBudget") if matches(b["spec"]["selector"], labels))
            self.assertEqual(budget["spec"]["maxUnavailable"], 0)
            if workload["kind"] == "StatefulSet":
                self.assertEqual(workload["spec"]["updateStrategy"], {"type": "OnDelete"})
            else:
                update = workload["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
                self.assertGreaterEqual(
                    update["partition"], workload["spec"]["replicas"], "groups below it stay as they are"
                )
            self.assertEqual(of_kind(objects, "HorizontalPodAutoscaler"), [])
            retention = claims(workload)["persistentVolumeClaimRetentionPolicy"]
            self.assertEqual(retention, {"whenDeleted": "Retain", "whenScaled": "Retain"})

    def test_the_priority_is_there(self) -> None:
        for objects, workload in self.each():
            names = [p["metadata"]["name"] for p in of_kind(objects, "PriorityClass")]
            self.assertEqual(names, [pod_spec(workload)["priorityClassName"]])

    # Names and networks

    def test_every_pod_has_a_name_of_its_own(self) -> None:
        for objects, workload in self.each():
            # The controller of LeaderWorkerSets takes a Service of that name that there is.
            name, labels = workload["spec"].get("serviceName", workload["metadata"]["name"]), pod_labels(workload)
            (service,) = (s for s in of_kind(objects, "Service") if s["metadata"]["name"] == name)
            self.assertEqual(service["spec"]["clusterIP"], "None")
            self.assertIs(service["spec"]["publishNotReadyAddresses"], True)
            self.assertLessEqual(service["spec"]["selector"].items(), labels.items())
            ports = {p["name"]: (p["port"], p["targetPort"]) for p in service["spec"]["ports"]}
            self.assertEqual(ports["grpc"], (self.port_of(workload, "grpc"), "grpc"))

    def test_selectors_of_stateful_sets_are_disjoint(self) -> None:
        for objects, workload in self.each():
            for other in of_kind(objects, "StatefulSet"):
                if workload["kind"] == "StatefulSet":
                    self.assertEqual(matches(workload["spec"]["selector"], pod_labels(other)), other is workload)

    def test_the_network_lets_in_trainers_and_prometheus_only(self) -> None:
        trainer, marked = {"lossd-client": "true"}, {"lossd-client": "true"}
        for objects, workload in self.each():
            serving = [labels for _, labels in pods(workload) if serves(workload, labels)]
            others = [labels for _, labels in pods(workload) if labels not in serving]
            server = Pod(serving[-1])
            ports = {name: self.port_of(workload, name) for name in ("grpc", "metrics", "health")}
            for client, allowed in (
                (Pod(trainer), {"grpc"}),
                (Pod(trainer, "training", marked), {"grpc"}),
                (Pod(trainer, "training"), set()),
                (Pod({}, "training", marked), set()),
                (Pod({}), set()),
                (Pod({"app.kubernetes.io/name": "prometheus"}, "monitoring"), {"metrics"}),
                (Pod({"app.kubernetes.io/name": "prometheus"}, "elsewhere"), set()),
                (Pod({}, "monitoring"), set()),
            ):
                reached = {name for name, port in ports.items() if may_connect(objects, client, server, port)}
                self.assertEqual(reached, allowed, client)
                if is_group(workload):
                    for other in others:
                        for port in (*ports.values(), self.port_of(workload, "control"), 40000):
                            self.assertFalse(may_connect(objects, client, Pod(other), port), "the leader alone serves")
                    self.assertFalse(may_connect(objects, client, server, self.port_of(workload, "control")))

    def test_the_network_lets_out_what_those_that_meet_need_only(self) -> None:
        resolver, outside = Pod({"k8s-app": "kube-dns"}, "kube-system"), Pod({}, "training")
        for objects, workload in self.each():
            for _, labels in pods(workload):
                pod, resolves = Pod(labels), is_group(workload) or is_replica(workload)
                for protocol in ("UDP", "TCP"):
                    self.assertEqual(may_connect(objects, pod, resolver, 53, protocol), resolves)
                self.assertFalse(may_connect(objects, pod, resolver, 443))
                for port in (53, 443, 40000, 50051, 50053, 50054):
                    self.assertFalse(may_connect(objects, pod, outside, port))

    # A group over hosts

    def test_pods_of_a_group_reach_each_other_and_no_other_group(self) -> None:
        labels = {
            "labels": [{"includeSelectors": True, "pairs": {"app.kubernetes.io/instance": "b"}}],
            "nameSuffix": "-b",
        }
        server = Pod(pod_labels(workloads(overlay("cpu"))[0]))
        for name in GROUPS:
            for other in GROUPS:
                second = render_mine(other, **labels)
                objects = installed(name) + second
                (workload,), (beside,) = workloads(overlay(name)), workloads(second)
                self.where = f"{name} beside {other}: "
                members, strangers = [Pod(p) for _, p in pods(workload)], [Pod(p) for _, p in pods(beside)]
                for port in (self.port_of(workload, "control"), 32768, 60999):
                    for one, two in itertools.permutations(members, 2):
                        self.assertTrue(may_connect(objects, one, two, port))
                    for one, two in itertools.permutations(strangers, 2):
                        self.assertTrue(may_connect(objects, one, two, port))
                    for member, stranger in itertools.product(members, strangers):
                        self.assertFalse(may_connect(objects, member, stranger, port))
                        self.assertFalse(may_connect(objects, stranger, member, port))
                    for member in members:
                        self.assertFalse(may_connect(objects, server, member, port))
                        self.assertFalse(may_connect(objects, member, server, port))

    def test_the_service_of_a_group_has_its_leader_alone(self) -> None:
        for objects, workload in self.each_group():
            found = [
                service
                for service in of_kind(objects, "Service")
                if service["metadata"]["name"].startswith("lossd-leader")
            ]
            (service,) = found
            self.assertEqual(service["spec"]["clusterIP"], "None")
            self.assertIs(service["spec"]["publishNotReadyAddresses"], True)
            selected = [
                name for name, labels in pods(workload) if matches({"matchLabels": service["spec"]["selector"]}, labels)
            ]
            self.assertEqual(selected, [f"{workload['metadata']['name']}-0"])
            for port in service["spec"]["ports"]:
                self.assertEqual(port["port"], self.port_of(workload, port["targetPort"]))

    def test_every_node_of_a_group_knows_its_place(self) -> None:
        for objects, workload in self.each_group():
            made = pods(workload)
            nodes = {self.node_of(workload, labels) for _, labels in made}
            self.assertEqual({index for index, _, _ in nodes}, {str(i) for i in range(len(made))})
            self.assertEqual({count for _, count, _ in nodes}, {str(len(made))})
            ((leader, service, namespace),) = {tuple(address.split(".")[:3]) for _, _, address in nodes}
            self.assertEqual((leader, namespace), (made[0][0], "lossd"))
            self.assertIn(service, [s["metadata"]["name"] for s in of_kind(objects, "Service")])

    def node_of(self, workload: Object, labels: dict[str, str]) -> tuple[str, str, str]:
        """Index, number of nodes and leader's address, as lossd in this pod is told them."""
        flags = dict(argument.removeprefix("--").split("=", 1) for argument in arguments_in(workload, labels))
        if workload["kind"] == "LeaderWorkerSet":
            self.assertEqual(flags["group"], "lws")
            size = str(workload["spec"]["leaderWorkerTemplate"]["size"])
            own, group = workload["metadata"]["name"], labels["leaderworkerset.sigs.k8s.io/group-index"]
            return labels["leaderworkerset.sigs.k8s.io/worker-index"], size, f"{own}-{group}.{own}.lossd"
        self.assertEqual(flags["group"], "flags")
        return flags["group_node"], flags["group_nodes"], flags["group_leader"]

    def test_a_second_group_has_a_leader_of_its_own(self) -> None:
        for name in GROUPS:
            (workload,) = workloads(render_mine(name, nameSuffix="-b"))
            made = pods(workload)
            for _, labels in made:
                self.assertEqual(self.node_of(workload, labels)[2].split(".")[0], made[0][0])

    def test_the_patches_of_the_documentation_change_the_size_of_a_group(self) -> None:
        for name, word in zip(GROUPS, ("{size: 4}", "LOSSD_NODES"), strict=True):
            self.where = f"{name}: "
            (patches,) = patches_of_the_documentation(word)
            (workload,) = workloads(render_mine(name, **patches))
            nodes = [self.node_of(workload, labels)[:2] for _, labels in pods(workload)]
            self.assertEqual(nodes, [(str(i), "4") for i in range(4)])
            if workload["kind"] == "LeaderWorkerSet":
                resources = container(workload)["resources"]
                self.assertEqual([resources[key]["nvidia.com/gpu"] for key in ("limits", "requests")], ["4", "4"])

    def test_the_secret_of_a_group_is_a_file_of_its_user_alone(self) -> None:
        for _, workload in self.each_group():
            arguments = container(workload)["args"]
            (file,) = (a.removeprefix("--group_token_file=") for a in arguments if a.startswith("--group_token_file="))
            folder, _, key = file.rpartition("/")
            (mount,) = (m for m in container(workload)["volumeMounts"] if m["mountPath"] == folder)
            (volume,) = (v for v in pod_spec(workload)["volumes"] if v["name"] == mount["name"])
            self.assertEqual((key, volume["secret"]), ("token", {"secretName": "lossd-group", "defaultMode": 0o400}))
            self.assertIs(mount["readOnly"], True)

    def test_no_secret_is_in_arguments_or_environment(self) -> None:
        for _, workload in self.each():
            for entry in container(workload)["env"]:
                self.assertNotIn("secretKeyRef", entry.get("valueFrom", {}), entry["name"])
            self.assertNotIn("envFrom", container(workload))
            self.assertFalse([a for a in container(workload)["args"] if re.match(r"--\w*token(?!_file)\w*=", a)])

    def test_ranks_of_a_group_meet_on_the_network_of_the_pods(self) -> None:
        for objects, workload in self.each_group():
            self.assertIn("--collective_network=trusted", container(workload)["args"])
            self.assertIn("--collective_interface=eth0", container(workload)["args"])
            self.assertEqual(self.port_of(workload, "control"), 50053)

    def test_a_group_waits_for_its_last_pod_longer_than_an_image_takes_and_shorter_than_the_probe_allows(self) -> None:
        for objects, workload in self.each_group():
            waits = seconds(server_config(objects, workload)["group_start_timeout"])
            start = container(workload)["startupProbe"]
            self.assertGreaterEqual(waits, 10 * 60)
            self.assertLess(waits, start["periodSeconds"] * start["failureThreshold"])

    def test_the_others_do_not_wait_for_a_leader_that_waits_for_them(self) -> None:
        for _, workload in self.each_group():
            if workload["kind"] == "StatefulSet":
                self.assertEqual(workload["spec"]["podManagementPolicy"], "Parallel")
            else:
                self.assertEqual(workload["spec"]["startupPolicy"], "LeaderCreated")

    def test_a_group_is_recreated_when_a_pod_of_it_restarts(self) -> None:
        ((_, workload),) = [found for found in self.each_group() if found[1]["kind"] == "LeaderWorkerSet"]
        self.assertEqual(workload["spec"]["leaderWorkerTemplate"]["restartPolicy"], "RecreateGroupOnPodRestart")

    def test_both_kinds_of_group_have_the_same_pods(self) -> None:
        # Called alike, so that what names something does it alike.
        (lws,), (stateful_set,) = (
            workloads(render_mine("group/lws", nameSuffix="-group")),
            workloads(overlay("group/stateful-set")),
        )
        self.assertEqual(self.without_place(lws), self.without_place(stateful_set))
        ours, theirs = (claims(workload)["volumeClaimTemplates"] for workload in (lws, stateful_set))
        self.assertEqual([claim["spec"] for claim in ours], [claim["spec"] for claim in theirs])

    def without_place(self, workload: Object) -> Object:
        """The pod, but for what tells it its place."""
        made = copy.deepcopy(pod_spec(workload))
        (only,) = made["containers"]
        only["args"] = [a for a in only["args"] if not re.match("--group(_nodes?|_leader)?=", a)]
        places = ("LOSSD_NODES", "LOSSD_NODE", "LOSSD_NAMESPACE", "LOSSD_STATEFUL_SET")
        only["env"] = [entry for entry in only["env"] if entry["name"] not in places]
        return made

    # Prometheus

    def test_an_instance_is_called_like_its_pod(self) -> None:
        (monitor,) = of_kind(render(KUBERNETES / "components/pod-monitor"), "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        relabeling = {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"}
        self.assertIn(relabeling, endpoint["relabelings"])

    def test_rules_and_dashboards_are_those_of_the_repository(self) -> None:
        generator = KUBERNETES / "components/prometheus-rule/generate.py"
        done = subprocess.run([sys.executable, "-B", generator, "--check"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        (rule,) = of_kind(render(KUBERNETES / "components/prometheus-rule"), "PrometheusRule")
        rules = (REPOSITORY / "deploy/prometheus/rules/lossd.rules.yml").read_text(encoding="utf-8")
        self.assertEqual(rule["spec"], yaml.safe_load(rules))

        files = {}
        for config_map in of_kind(render(KUBERNETES / "components/dashboards"), "ConfigMap"):
            self.assertEqual(config_map["metadata"]["labels"]["grafana_dashboard"], "1")
            files |= config_map["data"]
        dashboards = (REPOSITORY / "deploy/grafana/dashboards").glob("*.json")
        self.assertEqual(files, {path.name: path.read_text(encoding="utf-8") for path in dashboards})

    def test_prometheus_finds_every_server(self) -> None:
        (monitor,) = of_kind(render(KUBERNETES / "components/pod-monitor"), "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        dropped = [rule for rule in endpoint["relabelings"] if rule.get("action") == "drop"]
        for _, workload in self.each():
            self.assertTrue(matches(monitor["spec"]["selector"], pod_labels(workload)))
            self.assertIn(endpoint["port"], [p["name"] for p in container(workload)["ports"]])
            self.assert_servers_are_kept(workload, dropped, "sourceLabels")

    def assert_servers_are_kept(self, workload: Object, dropped: list[Object], source: str) -> None:
        """Every pod, or of a group the leader alone, whatever else StatefulSets have."""
        for name, labels in pods(workload):
            meta = {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key): value for key, value in labels.items()}
            gone = any(
                re.fullmatch(rule["regex"], ";".join(meta.get(label, "") for label in rule[source])) for rule in dropped
            )
            self.assertEqual(gone, not serves(workload, labels), name)

    def test_the_second_server_of_a_stateful_set_is_scraped_too(self) -> None:
        (monitor,) = of_kind(render(KUBERNETES / "components/pod-monitor"), "PodMonitor")
        (rule,) = (r for r in monitor["spec"]["podMetricsEndpoints"][0]["relabelings"] if r.get("action") == "drop")
        for values in (";;1", "group;0;1"):  # a server of its own; the leader of a LeaderWorkerSet's second group
            self.assertIsNone(re.fullmatch(rule["regex"], values), values)

    def test_the_job_of_the_documentation_finds_every_server(self) -> None:
        page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")
        (text,) = re.findall(r"^    scrape_configs:\n(?:    .*\n)+", page, re.MULTILINE)
        (job,) = yaml.safe_load(text)["scrape_configs"]
        (discovery,) = job["kubernetes_sd_configs"]
        self.assertEqual((discovery["role"], discovery["namespaces"]["names"]), ("pod", ["lossd"]))
        (kept,) = (rule for rule in job["relabel_configs"] if rule.get("action") == "keep")
        self.assertEqual(
            kept["source_labels"],
            ["__meta_kubernetes_pod_label_app_kubernetes_io_name", "__meta_kubernetes_pod_container_port_name"],
        )
        named = {
            rule["target_label"]: rule["source_labels"] for rule in job["relabel_configs"] if "target_label" in rule
        }
        self.assertEqual(named["instance"], ["__meta_kubernetes_pod_name"])
        self.assertLessEqual({"instance", "namespace", "pod"}, set(named), "what the rules count servers by")
        dropped = [rule for rule in job["relabel_configs"] if rule.get("action") == "drop"]
        for _, workload in self.each():
            for port in container(workload)["ports"]:
                found = f"{pod_labels(workload)['app.kubernetes.io/name']};{port['name']}"
                self.assertEqual(bool(re.fullmatch(kept["regex"], found)), port["name"] == "metrics")
            self.assert_servers_are_kept(workload, dropped, "source_labels")

    def test_rules_know_a_group_by_its_name(self) -> None:
        # Its pods are one server: what is expected is counted by names (deploy/prometheus/rules).
        for _, workload in self.each_group():
            self.assertEqual(
                workload["metadata"]["name"], "lossd" if workload["kind"] == "LeaderWorkerSet" else "lossd-group"
            )

    def test_certificates_are_for_every_pod(self) -> None:
        (certificate,) = (
            c
            for c in of_kind(render(KUBERNETES / "components/cert-manager"), "Certificate")
            if c["spec"]["secretName"] == "lossd-tls"
        )
        for name in certificate["spec"]["dnsNames"]:
            if name.startswith("*."):
                self.assertIn(".", name[2:], "a name that gRPC matches with nothing")
        for objects, workload in self.each():
            service = workload["spec"].get("serviceName", workload["metadata"]["name"])
            names = [f"{workload['metadata']['name']}-{replica}.{service}.lossd" for replica in (0, 1, 9)]
            names += [f"{found['metadata']['name']}.lossd" for found in of_kind(objects, "Service")]
            for name in names:
                for suffix in ("svc", "svc.cluster.local"):
                    wildcard = f"*.{name.partition('.')[2]}.{suffix}"
                    self.assertIn(wildcard, certificate["spec"]["dnsNames"], name)

    def test_nothing_of_the_namespace_folder_is_pruned(self) -> None:
        for manifest in render(KUBERNETES / "namespace"):
            self.assertLessEqual(
                UNPRUNED.items(), manifest["metadata"].get("annotations", {}).items(), manifest["kind"]
            )

    def test_a_further_lossd_needs_no_further_name(self) -> None:
        # As the documentation says: a folder of multi-head is copied, and has another suffix.
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(KUBERNETES, Path(folder, "kubernetes"))
            copied = Path(folder, "kubernetes/overlays/multi-head/second")
            shutil.copytree(Path(folder, "kubernetes/overlays/multi-head/draft"), copied)
            kustomization = copied / "kustomization.yaml"
            kustomization.write_text(
                kustomization.read_text(encoding="utf-8").replace("draft", "second"), encoding="utf-8"
            )
            (workload,) = of_kind(render(copied), "StatefulSet")
        self.assertEqual(workload["metadata"]["name"], "lossd-second")
        self.assertEqual(workload["spec"]["serviceName"], "lossd")


if __name__ == "__main__":
    unittest.main()
