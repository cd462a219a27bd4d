#!/usr/bin/env python3
"""Every object of every overlay, and of the components that none of them uses, against the strict schemas of Kubernetes."""

from __future__ import annotations

import copy
import unittest

import jsonschema
import kubernetes_validate
from custom_resources import SCHEMAS
from manifests import OVERLAYS, Object, container, of_kind, overlay, render

# The releases that are supported upstream, those that clusters lag behind with, and one that is newer than all of them.
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]


def errors_of(manifest: Object, version: str) -> list[str]:
    schema = SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is not None:
        return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def name_of(manifest: Object) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


class Schemas(unittest.TestCase):
    def check(self, folder: str) -> None:
        objects = render(folder)
        self.assertTrue(objects)
        for version in VERSIONS:
            found = {name_of(manifest): errors for manifest in objects if (errors := errors_of(manifest, version))}
            self.assertEqual(found, {}, f"{folder} on Kubernetes {version}")

    def test_overlays(self) -> None:
        for name in OVERLAYS:
            with self.subTest(overlay=name):
                self.check(f"overlays/{name}")

    def test_component_of_cert_manager(self) -> None:
        self.check("components/cert-manager")

    def test_a_wrong_field_is_found(self) -> None:
        for kind in ("StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Namespace"):
            with self.subTest(kind=kind):
                manifest = copy.deepcopy(of_kind(overlay("cpu"), kind)[0])
                manifest.setdefault("spec", {})["noSuchField"] = 1
                for version in VERSIONS:
                    self.assertTrue(errors_of(manifest, version), version)

    def test_a_wrong_field_of_the_container_is_found(self) -> None:
        stateful_set = copy.deepcopy(of_kind(overlay("cpu"), "StatefulSet")[0])
        container(stateful_set)["livenessProbe"]["grpc"]["port"] = "health"
        for version in VERSIONS:
            self.assertTrue(errors_of(stateful_set, version), version)


if __name__ == "__main__":
    unittest.main()
