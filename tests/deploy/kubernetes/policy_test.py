#!/usr/bin/env python3
"""What no schema knows: that pods are admitted by the restricted profile, that a drain fits, that what names each other
fits together, and that nothing lets in or evicts more than it should. Each for every overlay."""

from __future__ import annotations

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
    KUBERNETES,
    OVERLAYS,
    REPOSITORY,
    Object,
    container,
    installed,
    matches,
    of_kind,
    overlay,
    overlay_with_components,
    pod_labels,
    pod_spec,
    quantity,
    render,
    seconds,
    server_config,
)

# What a process needs beside heads, workspace and staging: code, connections, memory that it keeps for chunks to come.
PROCESS_BYTES = 2 << 30
# Volumes that the restricted profile admits, of those that there are here.
ADMITTED_VOLUMES = {"configMap", "emptyDir", "secret"}
# What tells Argo CD and Flux to leave an object alone that its manifests no longer have.
UNPRUNED = {"argocd.argoproj.io/sync-options": "Prune=false", "kustomize.toolkit.fluxcd.io/prune": "disabled"}


class Policy(unittest.TestCase):
    where = ""

    def each(self) -> Iterator[tuple[tuple[Object, ...], Object]]:
        """(objects, StatefulSet) of every overlay and the namespace; what fails until the next names it."""
        for name in OVERLAYS:
            for stateful_set in of_kind(overlay(name), "StatefulSet"):
                self.where = f"{stateful_set['metadata']['name']} of overlay {name}: "
                yield installed(name), stateful_set

    def _formatMessage(self, msg: str | None, standardMsg: str) -> str:  # noqa: N802, N803
        return self.where + super()._formatMessage(msg, standardMsg)

    def port_of(self, stateful_set: Object, name: str) -> int:
        (port,) = (p["containerPort"] for p in container(stateful_set)["ports"] if p["name"] == name)
        return port

    # The restricted profile

    def test_pods_are_of_the_restricted_profile(self) -> None:
        for _, stateful_set in self.each():
            spec = pod_spec(stateful_set)
            security, own = spec["securityContext"], container(stateful_set)["securityContext"]
            self.assertIs(security["runAsNonRoot"], True)
            self.assertGreater(security["runAsUser"], 0)
            self.assertGreater(security["runAsGroup"], 0)
            self.assertEqual(security["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertIs(own["allowPrivilegeEscalation"], False)
            self.assertIs(own["privileged"], False)
            self.assertEqual(own["capabilities"], {"drop": ["ALL"]})
            self.assertFalse({"hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"} & set(spec))
            self.assertFalse(any("hostPort" in port for port in container(stateful_set)["ports"]))
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
            kinds = {manifest["kind"] for manifest in overlay(name) + overlay_with_components(name)}
            shared = {"Namespace", "PersistentVolumeClaim", "PersistentVolume", "PriorityClass", "NetworkPolicy", "Secret"}
            self.assertFalse(kinds & shared, name)

    def test_the_root_file_system_is_read_only_and_what_is_written_is_a_volume(self) -> None:
        for objects, stateful_set in self.each():
            self.assertIs(container(stateful_set)["securityContext"]["readOnlyRootFilesystem"], True)
            volumes = {v["name"]: v for v in pod_spec(stateful_set)["volumes"]}
            volumes |= {t["metadata"]["name"]: t for t in stateful_set["spec"]["volumeClaimTemplates"]}
            mounts = {m["mountPath"]: m for m in container(stateful_set)["volumeMounts"]}
            self.assertEqual({m["name"] for m in mounts.values()}, set(volumes))
            checkpoints = server_config(objects, stateful_set)["checkpoint_dir"]
            (state,) = (m for path, m in mounts.items() if checkpoints.startswith(path + "/"))
            self.assertIn("spec", volumes[state["name"]], "checkpoints are on a claimed volume")
            self.assertEqual(volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"], "Memory")
            for path in ("/run/lossd", "/tmp"):
                self.assertIn("sizeLimit", volumes[mounts[path]["name"]]["emptyDir"])

    def test_no_token_of_kubernetes_is_in_the_pod(self) -> None:
        for objects, stateful_set in self.each():
            account = pod_spec(stateful_set)["serviceAccountName"]
            (found,) = (a for a in of_kind(objects, "ServiceAccount") if a["metadata"]["name"] == account)
            self.assertIs(found["automountServiceAccountToken"], False)
            self.assertIs(pod_spec(stateful_set)["automountServiceAccountToken"], False)

    def test_no_secret_is_written_down(self) -> None:
        for name in OVERLAYS:
            self.assertEqual(of_kind(overlay(name), "Secret"), [])

    # The server's configuration

    def test_everything_that_leaves_the_pod_is_guarded(self) -> None:
        for objects, stateful_set in self.each():
            config = server_config(objects, stateful_set)
            secrets = {v["name"]: v["secret"] for v in pod_spec(stateful_set)["volumes"] if "secret" in v}
            mounts = {m["mountPath"]: m["name"] for m in container(stateful_set)["volumeMounts"]}
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
        for _, stateful_set in self.each():
            for mount in container(stateful_set)["volumeMounts"]:
                self.assertFalse({"subPath", "subPathExpr"} & set(mount), mount["mountPath"])

    def test_ports_are_those_of_the_configuration(self) -> None:
        for objects, stateful_set in self.each():
            config = server_config(objects, stateful_set)
            for flag, port in (("listen", "grpc"), ("metrics_listen", "metrics"), ("health_listen", "health")):
                self.assertEqual(config[flag].split(",")[0], f"0.0.0.0:{self.port_of(stateful_set, port)}")

    def test_lossctl_in_the_pod_finds_its_socket_and_a_token(self) -> None:
        for objects, stateful_set in self.each():
            given = {entry["name"]: entry.get("value") for entry in container(stateful_set)["env"]}
            self.assertIn(given["LOSSD_SERVER"], server_config(objects, stateful_set)["listen"].split(",")[1:])
            mounts = {mount["mountPath"]: mount["name"] for mount in container(stateful_set)["volumeMounts"]}
            self.assertEqual(mounts[given["LOSSD_SERVER"].removeprefix("unix:").rpartition("/")[0]], "run")
            self.assertEqual(mounts[given["LOSSD_TOKEN_FILE"].rpartition("/")[0]], "tokens")

    def test_a_drained_pod_goes_on_where_it_stopped(self) -> None:
        for objects, stateful_set in self.each():
            config = server_config(objects, stateful_set)
            self.assertIs(config["restore"], True)
            grace = pod_spec(stateful_set)["terminationGracePeriodSeconds"]
            self.assertGreaterEqual(grace, seconds(config["drain_timeout"]) + 30)

    def test_a_drain_that_is_allowed_is_no_alert(self) -> None:
        text = (REPOSITORY / "deploy/prometheus/rules/lossd.rules.yml").read_text(encoding="utf-8")
        (alert,) = (
            rule
            for group in yaml.safe_load(text)["groups"]
            for rule in group["rules"]
            if rule.get("alert") == "LossdDrainingTooLong"
        )
        for objects, stateful_set in self.each():
            allowed = seconds(server_config(objects, stateful_set)["drain_timeout"])
            self.assertGreater(seconds(alert["for"]), allowed)

    def test_memory_fits_the_limit(self) -> None:
        for objects, stateful_set in self.each():
            config = server_config(objects, stateful_set)
            needed = config["staging_bytes"] + PROCESS_BYTES
            for volume in pod_spec(stateful_set)["volumes"]:
                if volume.get("emptyDir", {}).get("medium") == "Memory":
                    needed += quantity(volume["emptyDir"]["sizeLimit"])
            if config["device"] == "cpu":
                needed += config["memory_limit_bytes"]
            else:  # the second copy of the weights, what heads keep page-locked
                needed += sum(2 * head["vocab_size"] * head["hidden_size"] for head in config["heads"]) + (1 << 30)
            self.assertLessEqual(needed, quantity(container(stateful_set)["resources"]["limits"]["memory"]))

    def test_heads_have_names_of_their_own(self) -> None:
        names = [
            head["name"]
            for stateful_set in of_kind(overlay("multi-head"), "StatefulSet")
            for head in server_config(overlay("multi-head"), stateful_set)["heads"]
        ]
        self.assertGreater(len(names), 1)
        self.assertEqual(len(names), len(set(names)))

    # Probes, resources, disruption

    def test_probes_ask_the_health_port(self) -> None:
        for _, stateful_set in self.each():
            health = self.port_of(stateful_set, "health")
            services = {}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                services[probe] = container(stateful_set)[probe]["grpc"].get("service", "")
                self.assertEqual(container(stateful_set)[probe]["grpc"]["port"], health)
            self.assertEqual(services, {"startupProbe": "", "livenessProbe": "liveness", "readinessProbe": ""})

    def test_probes_are_patient(self) -> None:
        for _, stateful_set in self.each():
            start, live = container(stateful_set)["startupProbe"], container(stateful_set)["livenessProbe"]
            self.assertGreaterEqual(
                start["periodSeconds"] * start["failureThreshold"], 30 * 60, "restoring a checkpoint takes time"
            )
            self.assertGreaterEqual(live["periodSeconds"] * live["failureThreshold"], 60)

    def test_resources_are_said(self) -> None:
        for _, stateful_set in self.each():
            resources = container(stateful_set)["resources"]
            self.assertEqual(
                resources["requests"]["memory"], resources["limits"]["memory"], "else the node may run out first"
            )
            self.assertIn("cpu", resources["requests"])
            self.assertNotIn("cpu", resources["limits"], "work that needs more for a moment would wait")

    def test_pods_are_of_the_class_guaranteed_with_the_component_of_that_name(self) -> None:
        for name in OVERLAYS:
            for stateful_set in of_kind(overlay_with_components(name), "StatefulSet"):
                resources = container(stateful_set)["resources"]
                self.assertEqual(resources["requests"], resources["limits"])
                self.assertLessEqual({"cpu", "memory"}, set(resources["limits"]))
                self.assertTrue(resources["limits"]["cpu"].isdigit(), "cores of its own are whole ones")

    def test_a_gpu_each(self) -> None:
        for objects, stateful_set in self.each():
            config = server_config(objects, stateful_set)
            resources, spec = container(stateful_set)["resources"], pod_spec(stateful_set)
            if config["device"] == "cpu":
                self.assertNotIn("nvidia.com/gpu", resources["limits"])
                continue
            self.assertEqual(config["device"], "cuda:0")
            self.assertEqual(resources["limits"]["nvidia.com/gpu"], "1")
            self.assertEqual(resources["requests"]["nvidia.com/gpu"], "1")
            self.assertIn({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, spec["tolerations"])
            self.assertTrue(container(stateful_set)["image"].endswith("-cuda"))

    def test_images_have_a_version(self) -> None:
        version = re.search(
            r"project\(lossd VERSION ([\d.]+)", (REPOSITORY / "CMakeLists.txt").read_text(encoding="utf-8")
        )
        for _, stateful_set in self.each():
            tag = container(stateful_set)["image"].rpartition(":")[2]
            self.assertRegex(tag, rf"^{re.escape(version[1])}-(cpu|cuda)$")

    def test_nothing_evicts_or_updates_a_pod_by_itself(self) -> None:
        for objects, stateful_set in self.each():
            labels = pod_labels(stateful_set)
            (budget,) = (b for b in of_kind(objects, "PodDisruptionBudget") if matches(b["spec"]["selector"], labels))
            self.assertEqual(budget["spec"]["maxUnavailable"], 0)
            self.assertEqual(stateful_set["spec"]["updateStrategy"], {"type": "OnDelete"})
            self.assertEqual(of_kind(objects, "HorizontalPodAutoscaler"), [])
            retention = stateful_set["spec"]["persistentVolumeClaimRetentionPolicy"]
            self.assertEqual(retention, {"whenDeleted": "Retain", "whenScaled": "Retain"})

    def test_the_priority_is_there(self) -> None:
        for objects, stateful_set in self.each():
            names = [p["metadata"]["name"] for p in of_kind(objects, "PriorityClass")]
            self.assertEqual(names, [pod_spec(stateful_set)["priorityClassName"]])

    # Names and networks

    def test_every_pod_has_a_name_of_its_own(self) -> None:
        for objects, stateful_set in self.each():
            name, labels = stateful_set["spec"]["serviceName"], pod_labels(stateful_set)
            (service,) = (s for s in of_kind(objects, "Service") if s["metadata"]["name"] == name)
            self.assertEqual(service["spec"]["clusterIP"], "None")
            self.assertIs(service["spec"]["publishNotReadyAddresses"], True)
            self.assertLessEqual(service["spec"]["selector"].items(), labels.items())
            ports = {p["name"]: (p["port"], p["targetPort"]) for p in service["spec"]["ports"]}
            self.assertEqual(ports["grpc"], (self.port_of(stateful_set, "grpc"), "grpc"))

    def test_selectors_of_stateful_sets_are_disjoint(self) -> None:
        for objects, stateful_set in self.each():
            for other in of_kind(objects, "StatefulSet"):
                self.assertEqual(matches(stateful_set["spec"]["selector"], pod_labels(other)), other is stateful_set)

    def test_the_network_lets_in_trainers_and_prometheus_only(self) -> None:
        trainer, prometheus = {"lossd-client": "true"}, {"app.kubernetes.io/name": "prometheus"}
        for objects, stateful_set in self.each():
            (policy,) = (
                n
                for n in of_kind(objects, "NetworkPolicy")
                if matches(n["spec"]["podSelector"], pod_labels(stateful_set))
            )
            self.assertEqual(set(policy["spec"]["policyTypes"]), {"Ingress", "Egress"})
            self.assertEqual(policy["spec"]["egress"], [])
            allowed = {}
            for rule in policy["spec"]["ingress"]:
                (port,) = rule["ports"]
                allowed[port["port"]] = rule["from"]
            self.assertEqual(set(allowed), {self.port_of(stateful_set, name) for name in ("grpc", "metrics")})
            for peer in allowed[self.port_of(stateful_set, "grpc")]:
                self.assertEqual(peer["podSelector"], {"matchLabels": trainer})
                self.assertIn(peer.get("namespaceSelector"), (None, {"matchLabels": trainer}))
            (peer,) = allowed[self.port_of(stateful_set, "metrics")]
            self.assertEqual(peer["podSelector"], {"matchLabels": prometheus})
            self.assertEqual(peer["namespaceSelector"], {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}})

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

    def test_prometheus_finds_every_pod(self) -> None:
        for _, stateful_set in self.each():
            (monitor,) = of_kind(render(KUBERNETES / "components/pod-monitor"), "PodMonitor")
            self.assertTrue(matches(monitor["spec"]["selector"], pod_labels(stateful_set)))
            self.assertIn(
                monitor["spec"]["podMetricsEndpoints"][0]["port"], [p["name"] for p in container(stateful_set)["ports"]]
            )

    def test_the_job_of_the_documentation_finds_every_pod(self) -> None:
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
        named = {rule["target_label"]: rule["source_labels"] for rule in job["relabel_configs"] if "target_label" in rule}
        self.assertEqual(named["instance"], ["__meta_kubernetes_pod_name"])
        self.assertLessEqual({"instance", "namespace", "pod"}, set(named), "what the rules count servers by")
        for _, stateful_set in self.each():
            for port in container(stateful_set)["ports"]:
                found = f"{pod_labels(stateful_set)['app.kubernetes.io/name']};{port['name']}"
                self.assertEqual(bool(re.fullmatch(kept["regex"], found)), port["name"] == "metrics")

    def test_certificates_are_for_every_pod(self) -> None:
        (certificate,) = (
            c
            for c in of_kind(render(KUBERNETES / "components/cert-manager"), "Certificate")
            if c["spec"]["secretName"] == "lossd-tls"
        )
        for name in certificate["spec"]["dnsNames"]:
            if name.startswith("*."):
                self.assertIn(".", name[2:], "a name that gRPC matches with nothing")
        for _, stateful_set in self.each():
            for replica in (0, 1, 9):
                pod = f"{stateful_set['metadata']['name']}-{replica}.{stateful_set['spec']['serviceName']}.lossd"
                for suffix in ("svc", "svc.cluster.local"):
                    wildcard = f"*.{pod.partition('.')[2]}.{suffix}"
                    self.assertIn(wildcard, certificate["spec"]["dnsNames"], pod)

    # From earlier manifests

    def test_certificates_keep_the_names_that_pods_have_until_they_are_deleted(self) -> None:
        (certificate,) = (
            c
            for c in of_kind(render(KUBERNETES / "components/cert-manager"), "Certificate")
            if c["spec"]["secretName"] == "lossd-tls"
        )
        for stateful_set in of_kind(overlay("multi-head"), "StatefulSet"):
            for suffix in ("svc", "svc.cluster.local"):
                self.assertIn(f"*.{stateful_set['metadata']['name']}.lossd.{suffix}", certificate["spec"]["dnsNames"])

    def test_nothing_of_the_namespace_folder_is_pruned(self) -> None:
        for manifest in render(KUBERNETES / "namespace"):
            self.assertLessEqual(UNPRUNED.items(), manifest["metadata"].get("annotations", {}).items(), manifest["kind"])

    def test_the_patch_of_the_documentation_guards_all_that_overlays_had(self) -> None:
        page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8")
        (text,) = re.findall(r"^( *)patches:\n((?:\1.*\n)+)", page, re.MULTILINE)
        patches = yaml.safe_load(textwrap.dedent(text[0] + "patches:\n" + text[1]))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "kubernetes").symlink_to(KUBERNETES)
            earlier = Path(folder, "earlier")
            earlier.mkdir()
            shutil.copytree(KUBERNETES / "namespace", Path(folder, "namespace"))
            kustomization = Path(folder, "namespace/kustomization.yaml")
            bare = yaml.safe_load(kustomization.read_text(encoding="utf-8"))
            del bare["commonAnnotations"]
            kustomization.write_text(yaml.safe_dump(bare), encoding="utf-8")
            resources = {"resources": ["../namespace", "../kubernetes/overlays/multi-head"]}
            (earlier / "kustomization.yaml").write_text(yaml.safe_dump(resources | patches), encoding="utf-8")
            guarded = {
                manifest["kind"]: UNPRUNED.items() <= manifest["metadata"].get("annotations", {}).items()
                for manifest in render(earlier)
            }
        moved = {manifest["kind"] for manifest in render(KUBERNETES / "namespace")}
        self.assertEqual({kind for kind, unpruned in guarded.items() if unpruned}, moved)

    def test_a_further_lossd_needs_no_further_name(self) -> None:
        # As the documentation says: a folder of multi-head is copied, and has another suffix.
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(KUBERNETES, Path(folder, "kubernetes"))
            copied = Path(folder, "kubernetes/overlays/multi-head/second")
            shutil.copytree(Path(folder, "kubernetes/overlays/multi-head/draft"), copied)
            kustomization = copied / "kustomization.yaml"
            kustomization.write_text(kustomization.read_text(encoding="utf-8").replace("draft", "second"), encoding="utf-8")
            (stateful_set,) = of_kind(render(copied), "StatefulSet")
        self.assertEqual(stateful_set["metadata"]["name"], "lossd-second")
        self.assertEqual(stateful_set["spec"]["serviceName"], "lossd")


if __name__ == "__main__":
    unittest.main()
