"""Renders the overlays of deploy/kubernetes with kubectl, and finds one's way in the objects."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
KUBERNETES = REPOSITORY / "deploy/kubernetes"
# Those whose pods are one server together.
GROUPS = ("group/lws", "group/stateful-set")
# Those whose servers hold replicas of the same heads: groups of pods, and pods.
REPLICAS = ("replicas/lws", "replicas/stateful-set")
OVERLAYS = ("cpu", "gpu", "multi-head", *GROUPS, *REPLICAS)
# What a kustomization of one's own may name: custom resources that some clusters have, dashboards, a class of pods.
COMPONENTS = ("cert-manager", "dashboards", "guaranteed", "pod-monitor", "prometheus-rule")
# What rendering may take from PATH: nothing but this kubectl.
KUBECTL = os.environ.get("LOSSD_KUBECTL", str(REPOSITORY / "build/deploy-tools/bin/kubectl"))

Object = dict[str, Any]


@functools.cache
def render(folder: Path) -> tuple[Object, ...]:
    """Objects of one kustomization; a warning of kubectl is an error."""
    command = [KUBECTL, "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or done.stderr:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}, {done.stderr}")
    return tuple(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))  # dashboards are long


def overlay(name: str) -> tuple[Object, ...]:
    return render(KUBERNETES / "overlays" / name)


def installed(name: str) -> tuple[Object, ...]:
    """An overlay, and what is applied once before any of them."""
    return render(KUBERNETES / "namespace") + overlay(name)


@functools.cache
def overlay_with_components(name: str) -> tuple[Object, ...]:
    """As a kustomization of one's own has it that names every component."""
    return render_mine(name, components=[f"../kubernetes/components/{component}" for component in COMPONENTS])


def render_mine(overlay_name: str, **fields: Any) -> tuple[Object, ...]:
    """A kustomization of one's own from an overlay, with further fields; paths in them begin with ../kubernetes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kubernetes").symlink_to(KUBERNETES)
        mine = Path(folder, "mine")
        mine.mkdir()
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"../kubernetes/overlays/{overlay_name}"],
            **fields,
        }
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
        return render.__wrapped__(mine)  # a folder of this name may have been another one


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def workloads(objects: tuple[Object, ...]) -> list[Object]:
    """What makes pods."""
    return of_kind(objects, "StatefulSet") + of_kind(objects, "LeaderWorkerSet")


def is_group(workload: Object) -> bool:
    """Whether its pods are one server together."""
    return pod_labels(workload).get("app.kubernetes.io/component") == "group"


def is_replica(workload: Object) -> bool:
    """Whether its servers hold replicas of the same heads."""
    return pod_labels(workload).get("lossd-replica") == "true"


def serves(workload: Object, labels: dict[str, str]) -> bool:
    """Whether the pod with these labels is there for trainers: of a group its leader is, of others every one."""
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    return not is_group(workload) or labels.get(index, labels["apps.kubernetes.io/pod-index"]) == "0"


def pod_template(workload: Object) -> Object:
    if workload["kind"] == "LeaderWorkerSet":
        return workload["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return workload["spec"]["template"]


def claims(workload: Object) -> Object:
    """What says which volumes are claimed for each pod, and when they go."""
    return workload["spec"].get("leaderWorkerTemplate", workload["spec"])


def pod_labels(workload: Object) -> dict[str, str]:
    return pod_template(workload)["metadata"]["labels"]


def pods(workload: Object) -> list[tuple[str, dict[str, str]]]:
    """Name and labels of its pods, with the labels that Kubernetes or the controller of LeaderWorkerSets gives them."""
    name, labels = workload["metadata"]["name"], pod_labels(workload)
    pod_name = "statefulset.kubernetes.io/pod-name"
    index, worker = "apps.kubernetes.io/pod-index", "leaderworkerset.sigs.k8s.io/worker-index"
    if workload["kind"] == "StatefulSet":
        made = [(f"{name}-{i}", {index: str(i)}) for i in range(workload["spec"]["replicas"])]
        return [(pod, {**labels, **own, pod_name: pod}) for pod, own in made]
    made = []
    for group in range(workload["spec"]["replicas"]):
        of_group = {
            **labels,
            "leaderworkerset.sigs.k8s.io/name": name,
            "leaderworkerset.sigs.k8s.io/group-index": str(group),
        }
        made.append((f"{name}-{group}", {**of_group, index: str(group), worker: "0"}))
        made += [
            (f"{name}-{group}-{i}", {**of_group, index: str(i), worker: str(i)})
            for i in range(1, workload["spec"]["leaderWorkerTemplate"]["size"])
        ]
    return [(pod, {**of_pod, pod_name: pod}) for pod, of_pod in made]


def pod_spec(workload: Object) -> Object:
    return pod_template(workload)["spec"]


def container(workload: Object) -> Object:
    (only,) = pod_spec(workload)["containers"]
    return only


def arguments_in(workload: Object, labels: dict[str, str]) -> list[str]:
    """As a pod with these labels has them, with values in the place of $(NAMES) as Kubernetes puts them."""
    environment = {}
    for entry in container(workload)["env"]:
        value = entry.get("value", "")
        if "fieldRef" in entry.get("valueFrom", {}):
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
            own = {"metadata.namespace": "lossd", "metadata.name": labels["statefulset.kubernetes.io/pod-name"]}
            value = labels[label[1]] if label else own[path]
        environment[entry["name"]] = value
    return [
        re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], argument)
        for argument in container(workload)["args"]
    ]


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """As Kubernetes selects; of operators those that are used here."""
    holds = {
        "In": lambda value, values: value in values,
        "NotIn": lambda value, values: value not in values,
    }
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        holds[expression["operator"]](labels.get(expression["key"]), expression["values"])
        for expression in selector.get("matchExpressions", [])
    )


def server_config(objects: tuple[Object, ...], workload: Object) -> Object:
    """lossd.json as the pod gets it."""
    (volume,) = (v for v in pod_spec(workload)["volumes"] if v["name"] == "config")
    name = volume["configMap"]["name"]
    (config_map,) = (found for found in of_kind(objects, "ConfigMap") if found["metadata"]["name"] == name)
    return json.loads(config_map["data"]["lossd.json"])


UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str) -> int:
    """Bytes of "16Gi"."""
    return int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)


def seconds(text: str) -> int:
    """The seconds of "300s" or "5m"."""
    return int(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
