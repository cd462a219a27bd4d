"""Renders the overlays of deploy/kubernetes with kubectl, and finds one's way in the objects."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
KUBERNETES = REPOSITORY / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu", "multi-head")
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
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kubernetes").symlink_to(KUBERNETES)
        mine = Path(folder, "mine")
        mine.mkdir()
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"../kubernetes/overlays/{name}"],
            "components": [f"../kubernetes/components/{component}" for component in COMPONENTS],
        }
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
        return render(mine)


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def pod_labels(stateful_set: Object) -> dict[str, str]:
    return stateful_set["spec"]["template"]["metadata"]["labels"]


def pod_spec(stateful_set: Object) -> Object:
    return stateful_set["spec"]["template"]["spec"]


def container(stateful_set: Object) -> Object:
    (only,) = pod_spec(stateful_set)["containers"]
    return only


def matches(selector: Object, labels: dict[str, str]) -> bool:
    return set(selector) == {"matchLabels"} and selector["matchLabels"].items() <= labels.items()


def server_config(objects: tuple[Object, ...], stateful_set: Object) -> Object:
    """lossd.json as the pod gets it."""
    (volume,) = (v for v in pod_spec(stateful_set)["volumes"] if v["name"] == "config")
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
