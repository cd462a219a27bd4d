#!/usr/bin/env python3
"""What the image holds beside its base, laid out from the programs in build/bin: its list of components, and that it
runs the way the Dockerfile says, as another user, on a read-only root. deploy/image_trial.sh tries a real image.

usage: image_files_test.py REPOSITORY
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from weights import write_weights

REPOSITORY = Path(sys.argv.pop(1))
DOCKERFILE = re.sub(r"\\\n", " ", (REPOSITORY / "Dockerfile").read_text(encoding="utf-8"))

# Starts the server as the image does, waits until the health check is content, loads a head, drains it; and once more,
# on what it left.
INSIDE = """
set -e
run() {{
  {server} &
  until {health} >/dev/null 2>&1; do kill -0 $!; sleep 0.1; done
  {health}
  $1 >&2
  lossctl status --json | grep '"incarnation"'
  kill -TERM $!
  wait $!
  echo drained
}}
run 'lossctl head load h /var/lib/lossd/h.safetensors --create'
id -u
touch /written /opt/lossd/written /usr/written 2>/dev/null && echo "the root can be written to"
touch /var/lib/lossd/written
run 'lossctl checkpoint list'
"""


# By whom tests/deploy/as_in_image.py has to be run.
UNSHARED = [] if os.geteuid() == 0 else ["sudo", "-n"]
UNSHARED += ["unshare", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount"]


def isolated() -> list[str]:
    """As UNSHARED; where the root is not a mount, as in a chroot, it cannot be told to keep mounts to itself: one, which the
    test undoes when it ends, may be seen outside of it meanwhile."""
    for command in (UNSHARED, [*UNSHARED, "--propagation", "unchanged"]):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    raise RuntimeError(
        "this test runs the server as another user on a read-only root, which takes root (or sudo without a "
        "password) and leave to make namespaces of mounts: in a container, CAP_SYS_ADMIN"
    )


def instruction(pattern: str) -> list[str]:
    """The arguments, in JSON, of the Dockerfile's only instruction that begins so."""
    (arguments,) = re.findall(rf"^{pattern} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    return json.loads(arguments)


def developers_bundle() -> list[tuple[str, int, int]]:
    """What lies in build/bundle, which is not the tests' to replace."""
    found = sorted((REPOSITORY / "build/bundle").rglob("*"))
    return [(str(path), path.lstat().st_ino, path.lstat().st_mtime_ns) for path in found]


class ImageFiles(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.isolated = isolated()
        folder = tempfile.TemporaryDirectory(prefix="lossd-image-")
        cls.addClassCleanup(folder.cleanup)
        cls.out = Path(folder.name)
        command = [
            REPOSITORY / "deploy/image_files.sh",
            "--no-build",
            "--out",
            cls.out,
            "--base-packages",
            "/var/lib/dpkg/status",
            "cpu",
        ]
        cls.bundle_before = developers_bundle()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
        cls.bundle_after = developers_bundle()
        cls.root = cls.out / "opt/lossd"
        write_weights(cls.out / "var/lib/lossd/h.safetensors", 8, 4)
        cls.bill = json.loads((cls.root / "share/sbom.cdx.json").read_text(encoding="utf-8"))

    def components(self, part: str) -> list[dict]:
        wanted = {"name": "lossd:part", "value": part}
        return [component for component in self.bill["components"] if wanted in component["properties"]]

    def test_a_bundle_that_somebody_made_stays_as_it_is(self) -> None:
        self.assertEqual(self.bundle_after, self.bundle_before)

    def test_only_what_is_needed_is_in_it(self) -> None:
        self.assertEqual({path.name for path in (self.root / "bin").iterdir()}, {"lossd", "lossctl"})
        self.assertEqual({path.name for path in self.root.iterdir()}, {"bin", "lib", "share"})
        self.assertIn(
            "-----BEGIN CERTIFICATE-----", (self.root / "share/ca-certificates.crt").read_text(encoding="utf-8")
        )

    def test_the_list_of_components_is_of_its_schema(self) -> None:
        text = (self.root / "share/sbom.cdx.json").read_text(encoding="utf-8")
        self.assertIsNone(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text))

    def test_every_library_is_of_a_component(self) -> None:
        listed = {
            prop["value"]
            for component in self.components("shipped")
            for prop in component["properties"]
            if prop["name"] == "lossd:file"
        }
        self.assertEqual(
            {file for file in listed if file.startswith("lib/")},
            {f"lib/{path.name}" for path in (self.root / "lib").iterdir() if not path.name.startswith("liblossd_")},
        )
        self.assertIn("share/ca-certificates.crt", listed)

    def test_components_have_versions_and_licences(self) -> None:
        for component in self.components("shipped"):
            self.assertRegex(component["purl"], r"^pkg:deb/\w+/[\w.%~-]+@[\w.%~-]+\?arch=\w+&distro=")
            package = component["name"]
            self.assertTrue((self.root / "share/licences" / package).is_file() or package == "ca-certificates", package)
        self.assertGreater(len(self.components("base")), 50)
        for component in self.bill["components"]:
            self.assertTrue(component["licenses"], component["name"])
        ids = {entry["license"].get("id") for component in self.components("shipped") for entry in component["licenses"]}
        self.assertLessEqual({"Apache-2.0", "BSD-3-Clause", "MIT"}, ids, "by the names that SPDX has for them")

    def test_every_file_has_its_hash(self) -> None:
        holders = [self.bill["metadata"]["component"], *self.bill["components"]]
        files = {file["name"]: file["hashes"] for holder in holders for file in holder.get("components", [])}
        for folder in ("bin", "lib"):
            for path in (self.root / folder).iterdir():
                self.assertIn(f"{folder}/{path.name}", files)
        for name, hashes in files.items():
            digest = hashlib.sha256((self.root / name).read_bytes()).hexdigest()
            self.assertEqual(hashes, [{"alg": "SHA-256", "content": digest}], name)

    def test_the_image_says_where_its_source_is(self) -> None:
        # A podman that only says what it was asked for.
        with tempfile.TemporaryDirectory() as folder:
            asked = Path(folder, "asked")
            program = Path(folder, "podman")
            program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{asked}\n', encoding="utf-8")
            program.chmod(0o755)
            environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
            command = [REPOSITORY / "deploy/image.sh", "--tool", "podman", "--source", "https://example.org/lossd"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("SOURCE=https://example.org/lossd", asked.read_text(encoding="utf-8").splitlines())
        self.assertIn('org.opencontainers.image.source="${SOURCE}"', DOCKERFILE)

    def test_it_runs_as_another_user_on_a_read_only_root(self) -> None:
        server = " ".join(instruction("ENTRYPOINT") + instruction("CMD") + ["--device=cpu"])
        health = " ".join(instruction("HEALTHCHECK .*CMD"))
        user, group = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE).groups()
        self.assertNotIn("0", (user, group))
        command = [*self.isolated, Path(__file__).with_name("as_in_image.py"), self.out, user, group]
        command += ["sh", "-c", INSIDE.format(server=server, health=health)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        first, second = (list(map(str.strip, run.splitlines())) for run in done.stdout.split(f"{user}\n"))
        self.assertEqual((first[0], first[2:]), ("serving", ["drained"]), done.stderr)
        self.assertEqual(second, first, "the same server to its clients, by its volume")

    def test_nothing_is_open_beyond_loopback(self) -> None:
        # With --network=host it would be open on the machine's own addresses.
        config = json.loads((self.root / "share/lossd.json").read_text(encoding="utf-8"))
        for key in ("listen", "metrics_listen", "health_listen"):
            self.assertTrue(config[key].startswith("127.0.0.1:"), key)

    def test_the_example_in_the_documentation_gives_a_drain_its_time(self) -> None:
        page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
        (command,) = re.findall(r"^    (docker run .*)$", page, re.MULTILINE)
        (allowed,) = re.findall(r"--stop-timeout[= ](\d+)", command)
        self.assertGreater(int(allowed), 30)  # --drain_timeout, which the image's configuration leaves as it is
        self.assertNotIn("drain_timeout", json.loads((self.root / "share/lossd.json").read_text(encoding="utf-8")))

    def test_the_configuration_listens_where_the_health_check_asks(self) -> None:
        config = json.loads((self.root / "share/lossd.json").read_text(encoding="utf-8"))
        health = instruction("HEALTHCHECK .*CMD")
        self.assertEqual(config["health_listen"], health[health.index("--server") + 1])
        exposed = set(re.search(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)[1].split())
        self.assertEqual(
            exposed, {config[key].rpartition(":")[2] for key in ("listen", "metrics_listen", "health_listen")}
        )


if __name__ == "__main__":
    unittest.main()
