#!/usr/bin/python3
"""Lists what an image of lossd holds, as CycloneDX 1.6 in JSON on standard output.

Shared libraries are traced to the distribution's packages that they were copied from, with what dpkg knows of them
here; those that only their headers were taken of are named below; lossd's own are what the list is about. The base's packages and wheels are added as given.
Every component says under which licences it is, and what is a file of the image has its SHA-256.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable
from urllib.parse import quote

DPKG_STATUS = "/var/lib/dpkg/status"
# Compiled into the programs, without a library that would tell.
HEADERS = ("nlohmann-json3-dev", "libcli11-dev", "libspdlog-dev", "libabsl-dev", "libgrpc++-dev", "libprotobuf-dev")
# Copied as a file, no library.
FILES = {"share/ca-certificates.crt": "ca-certificates"}

# Short names of Debian's copyright files that SPDX calls otherwise. Others are ids of SPDX already, or names only.
SPDX = {
    "Apache-2": "Apache-2.0",
    "BSD-2-clause": "BSD-2-Clause",
    "BSD-3-clause": "BSD-3-Clause",
    "BSL-1": "BSL-1.0",
    "Expat": "MIT",
    "GPL-2": "GPL-2.0-only",
    "GPL-2+": "GPL-2.0-or-later",
    "GPL-3": "GPL-3.0-only",
    "GPL-3+": "GPL-3.0-or-later",
    "LGPL-2": "LGPL-2.0-only",
    "LGPL-2+": "LGPL-2.0-or-later",
    "LGPL-2.1": "LGPL-2.1-only",
    "LGPL-2.1+": "LGPL-2.1-or-later",
    "LGPL-3": "LGPL-3.0-only",
    "LGPL-3+": "LGPL-3.0-or-later",
}
SPDX_IDS = {"Apache-2.0", "BSL-1.0", "ISC", "MIT", "MPL-2.0", "Zlib", *SPDX.values()}

Package = dict[str, str]


def read_packages(path: str) -> dict[str, Package]:
    """Installed packages of a dpkg status file, by name."""
    packages = {}
    for paragraph in pathlib.Path(path).read_text(encoding="utf-8", errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields
    return packages


def os_release() -> dict[str, str]:
    lines = pathlib.Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def licences_of(package: str) -> list[str]:
    """Short names in the package's machine-readable copyright file; none if it is not one."""
    path = pathlib.Path("/usr/share/doc", package, "copyright")
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    if not re.match(r"Format: ?https?:", text):
        return []
    return sorted(set(re.findall(r"^License: *(\S.*?) *$", text, re.MULTILINE)))


def licence_entries(names: Iterable[str], otherwise: str) -> list[dict]:
    """`otherwise`: where to read it, if nothing names it."""
    entries = {SPDX.get(name, name): None for name in names} or {otherwise: None}
    return [{"license": {"id" if name in SPDX_IDS else "name": name}} for name in entries]


def file_components(root: pathlib.Path, files: Iterable[str]) -> list[dict]:
    return [
        {
            "type": "file",
            "bom-ref": f"file:{file}",
            "name": file,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256((root / file).read_bytes()).hexdigest()}],
        }
        for file in sorted(files)
    ]


def debian_component(package: Package, release: dict[str, str], scope: str) -> dict:
    name, version = package["Package"], package["Version"]
    system, system_version = release["ID"], release.get("VERSION_ID", "")
    purl = (
        f"pkg:deb/{system}/{quote(name, safe='.-~')}@{quote(version, safe='.-~')}"
        f"?arch={package['Architecture']}&distro={system}-{system_version}"
    )
    component = {"type": "library", "bom-ref": f"{scope}:{name}", "name": name, "version": version, "purl": purl}
    otherwise = f"see share/licences/{name}" if scope == "shipped" else f"see /usr/share/doc/{name}/copyright"
    component["licenses"] = licence_entries(licences_of(name), otherwise)
    return component | {"properties": [{"name": "lossd:part", "value": scope}]}


def with_files(component: dict, root: pathlib.Path, files: Iterable[str]) -> dict:
    found = file_components(root, files)
    properties = component["properties"] + [{"name": "lossd:file", "value": file["name"]} for file in found]
    return component | {"properties": properties} | ({"components": found} if found else {})


def owners_of(libraries: list[str]) -> dict[str, str]:
    """The packages that shared libraries of these names came in."""
    owners: dict[str, set[str]] = {library: set() for library in libraries}
    folders = ("/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib", "/lib")
    command = ["dpkg-query", "-S", *(f"{folder}/{library}" for library in libraries for folder in folders)]
    for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
        package, _, path = line.partition(": ")
        owners[path.rpartition("/")[2]].add(package.split(":")[0])
    for library, packages in owners.items():
        if len(packages) != 1:
            sys.exit(
                f"sbom.py: {library} must be of one package here, and is of: {', '.join(sorted(packages)) or 'none'}"
            )
    return {library: packages.pop() for library, packages in owners.items()}


def shipped_components(root: pathlib.Path, release: dict[str, str], foreign: set[str]) -> list[dict]:
    packages = read_packages(DPKG_STATUS)
    files: dict[str, list[str]] = {}
    libraries = sorted(path.name for path in (root / "lib").iterdir() if path.name not in foreign)
    for library, package in owners_of(libraries).items():
        files.setdefault(package, []).append(f"lib/{library}")
    for file, package in FILES.items():
        if (root / file).exists():
            files.setdefault(package, []).append(file)
    components = [
        with_files(debian_component(packages[name], release, "shipped"), root, files[name]) for name in sorted(files)
    ]
    return components + [
        debian_component(packages[name], release, "compiled-in") for name in HEADERS if name in packages
    ]


def wheel_component(folder: str, root: pathlib.Path) -> dict:
    fields = dict(
        re.findall(
            r"^([A-Za-z-]+): (.*)$", (pathlib.Path(folder) / "METADATA").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    name, version = fields["Name"], fields["Version"]
    component = {
        "type": "library",
        "bom-ref": f"wheel:{name}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [
            {"license": {"name": fields.get("License", fields.get("License-Expression", "see share/licences/nvidia"))}}
        ],
        "properties": [{"name": "lossd:part", "value": "wheel"}],
    }
    return with_files(component, root, [f"lib/{file}" for file in files_of_wheel(name, root)])


def files_of_wheel(name: str, root: pathlib.Path) -> list[str]:
    return sorted(file.name for file in (root / "lib").glob("libcublas*")) if name == "nvidia-cublas" else []


def bill(arguments: argparse.Namespace) -> dict:
    root, release = pathlib.Path(arguments.root), os_release()
    wheels = [wheel_component(folder, root) for folder in arguments.wheel]
    foreign = {file.name for pattern in ("libcublas*", "liblossd_*") for file in (root / "lib").glob(pattern)}
    components = shipped_components(root, release, foreign) + wheels
    direct = [component["bom-ref"] for component in components]
    if arguments.base_packages:
        base = read_packages(arguments.base_packages)
        components += [debian_component(base[name], release, "base") for name in sorted(base)]
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", datetime.datetime.now().timestamp()))
    timestamp = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    identity = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([arguments.version, timestamp, components]))
    application = {
        "type": "application",
        "bom-ref": "lossd",
        "name": "lossd",
        "version": arguments.version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "components": file_components(
            root, [str(path.relative_to(root)) for pattern in ("bin/*", "lib/liblossd_*") for path in root.glob(pattern)]
        ),
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity}",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": application},
        "components": components,
        "dependencies": [{"ref": "lossd", "dependsOn": direct}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder with lossd's lib/ and share/")
    parser.add_argument("--version", required=True, help="of lossd")
    parser.add_argument("--base-packages", help="/var/lib/dpkg/status of the image's base")
    parser.add_argument("--wheel", action="append", default=[], help="a .dist-info folder that files were taken from")
    json.dump(bill(parser.parse_args()), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
