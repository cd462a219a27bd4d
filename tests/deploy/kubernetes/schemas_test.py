#!/usr/bin/env python3
"""Every object of every overlay, and of the components that none of them uses, against Kubernetes' strict schemas."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import textwrap
import unittest
from pathlib import Path

import jsonschema
import kubernetes_validate
from custom_resources import SCHEMAS, embedded_in
from manifests import (
    OVERLAYS,
    REPOSITORY,
    Object,
    container,
    installed,
    of_kind,
    overlay,
    overlay_with_components,
    render,
    server_config,
    workloads,
)

# The releases that are supported upstream, those that clusters lag behind with, and one that is newer than all of them.
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]


def is_custom(manifest: Object) -> bool:
    return (manifest["apiVersion"], manifest["kind"]) in SCHEMAS


def errors_of(manifest: Object, version: str) -> list[str]:
    return list(errors_of_text(json.dumps(manifest), version))


@functools.cache  # overlays have most objects in common, and the library reads its schemas again each time
def errors_of_text(text: str, version: str) -> list[str]:
    manifest = json.loads(text)
    schema = SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is not None:
        errors = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]
        return errors + [error for part in embedded_in(manifest) for error in errors_of(part, version)]
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def name_of(manifest: Object) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


class Schemas(unittest.TestCase):
    def check(self, objects: tuple[Object, ...]) -> None:
        self.assertTrue(objects)
        for version in VERSIONS:
            found = {name_of(manifest): errors for manifest in objects if (errors := errors_of(manifest, version))}
            self.assertEqual(found, {}, f"on Kubernetes {version}")

    def test_overlays(self) -> None:
        for name in OVERLAYS:
            with self.subTest(overlay=name):
                self.check(installed(name))

    def test_overlays_with_every_component(self) -> None:
        for name in OVERLAYS:
            with self.subTest(overlay=name):
                self.check(overlay_with_components(name))
                added = {manifest["kind"] for manifest in overlay_with_components(name) if is_custom(manifest)}
                self.assertEqual(added | {"LeaderWorkerSet"}, {kind for _, kind in SCHEMAS})

    def test_overlays_need_nothing_that_a_cluster_may_not_have(self) -> None:
        for name in OVERLAYS:
            needed = ["LeaderWorkerSet lossd"] if name.endswith("/lws") else []
            self.assertEqual([name_of(manifest) for manifest in installed(name) if is_custom(manifest)], needed, name)

    def test_the_overlay_of_the_documentation(self) -> None:
        page = (REPOSITORY / "docs/kubernetes.md").read_text(encoding="utf-8").splitlines()
        first = page.index("       # my-lossd/kustomization.yaml") + 1
        length = next(i for i, line in enumerate(page[first:]) if not line.strip())
        with tempfile.TemporaryDirectory() as folder:
            mine = Path(folder, "my-lossd")
            mine.mkdir()
            Path(folder, "lossd").symlink_to(REPOSITORY)
            (mine / "kustomization.yaml").write_text(
                textwrap.dedent("\n".join(page[first : first + length])), encoding="utf-8"
            )
            (mine / "lossd.json").write_text('{"listen": "mine"}', encoding="utf-8")
            objects = render(mine)
        (stateful_set,) = of_kind(objects, "StatefulSet")
        self.assertEqual(server_config(objects, stateful_set), {"listen": "mine"})
        self.assertEqual(container(stateful_set)["image"], "registry.example/lossd:0.1.0-cuda")
        for manifest in objects:
            self.assertEqual(errors_of(manifest, VERSIONS[-1]), [])

    def test_a_wrong_field_is_found(self) -> None:
        for kind in ("StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "Namespace"):
            with self.subTest(kind=kind):
                objects = installed("cpu") + overlay_with_components("cpu")
                manifest = copy.deepcopy(of_kind(objects, kind)[0])
                manifest.setdefault("spec", {})["noSuchField"] = 1
                for version in VERSIONS:
                    self.assertTrue(errors_of(manifest, version), version)

    def test_a_wrong_field_of_the_container_is_found(self) -> None:
        for name in ("cpu", "group/lws"):
            workload = copy.deepcopy(workloads(overlay(name))[0])
            container(workload)["livenessProbe"]["grpc"]["port"] = "health"
            for version in VERSIONS:
                self.assertTrue(errors_of(workload, version), version)

    def test_a_wrong_field_of_a_leader_worker_set_is_found(self) -> None:
        (workload,) = workloads(overlay("group/lws"))
        for path in (
            ("noSuchField",),
            ("leaderWorkerTemplate", "noSuchField"),
            ("leaderWorkerTemplate", "workerTemplate", "spec", "noSuchField"),
            ("leaderWorkerTemplate", "volumeClaimTemplates", 0, "spec", "noSuchField"),
        ):
            broken = copy.deepcopy(workload)
            where = broken["spec"]
            for step in path[:-1]:
                where = where[step]
            where[path[-1]] = 1
            self.assertTrue(errors_of(broken, VERSIONS[0]), path)


if __name__ == "__main__":
    unittest.main()
