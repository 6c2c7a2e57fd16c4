"""Tell what the pinned packages are: a CycloneDX 1.6 document of all of them, and their licences as docs/licences.md.

What is pinned stands in requirements/; licences are taken from packages' own metadata, and from licences.yaml beside
this file where that does not say. Advisories are not looked up: nothing here reaches a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import re
import uuid
from collections.abc import Mapping
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "licences.md"
# File -> what it is for, in the order of the page.
LOCKED = {
    "agent.txt": "boards",
    "all.txt": "the farm with all extras but `torch`, and its development tools",
    "torch.txt": "programs of `torch.export`",
    "board-tools.txt": "provisioning boards",
    "docs.txt": "building the site",
}
# What metadata of before SPDX expressions says, by what it means.
_SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}


@dataclasses.dataclass
class Package:
    """One pinned package; its versions differ between versions of Python. `files` of requirements/ pin it."""

    name: str
    versions: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    files: list[str] = dataclasses.field(default_factory=list)
    licence: str = ""


def read_packages() -> list[Package]:
    """Everything that requirements/ pins, with its licence. Raises SystemExit naming those whose licence is unknown."""
    found: dict[str, Package] = {}
    for file in LOCKED:
        text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
        for pin in re.finditer(r"(?m)^([a-z0-9.-]+)==([^ \n]+)[^\n]*\n((?:    --hash=[^\n]*\n?)*)", text):
            package = found.setdefault(pin[1], Package(pin[1]))
            package.versions.setdefault(pin[2], set()).update(re.findall(r"sha256:([0-9a-f]{64})", pin[3]))
            package.files += [file] if file not in package.files else []
    said = yaml.safe_load((pathlib.Path(__file__).with_name("licences.yaml")).read_text(encoding="utf-8"))
    for package in found.values():
        package.licence = find_licence(package.name, said)
    if unknown := [package.name for package in found.values() if not package.licence]:
        raise SystemExit(f"no licence is known of {', '.join(unknown)}; say it in deploy/release/licences.yaml")
    return sorted(found.values(), key=lambda package: package.name)


def find_licence(name: str, said: Mapping[str, Mapping[str, str]]) -> str:
    """An SPDX expression; empty where nobody says."""
    if name in said["wrong"]:
        return said["wrong"][name]
    try:
        return _read_metadata(name) or said["unclear"].get(name, "")
    except importlib.metadata.PackageNotFoundError:
        return said["elsewhere"].get(name, "") or said["unclear"].get(name, "")


def _read_metadata(name: str) -> str:
    metadata: Any = importlib.metadata.metadata(name)
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [str(each) for each in metadata.get_all("Classifier") or [] if str(each).startswith("License ::")]
    for text in (str(metadata.get("License") or "").strip(), *(each.split(" :: ")[-1] for each in classifiers)):
        if text in _SPDX:
            return _SPDX[text]
        if text in ("MIT", "Apache-2.0", "BSD-3-Clause", "BSD-2-Clause", "MPL-2.0"):
            return text
    return ""


def make_document(packages: list[Package]) -> dict[str, Any]:
    """The CycloneDX document. It has no time, and its number comes from what it lists: equal pins, equal bytes."""
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{package.name}@{version}",
            "name": package.name,
            "version": version,
            "purl": f"pkg:pypi/{package.name}@{version}",
            "licenses": [{"expression": package.licence}],
            "properties": [{"name": "tvm-farm:requirements", "value": file} for file in package.files]
            # The wheels of all machines: a component's own `hashes` are those of one file.
            + [{"name": "tvm-farm:wheel-sha256", "value": digest} for digest in sorted(digests)],
        }
        for package in packages
        for version, digests in sorted(package.versions.items())
    ]
    version = importlib.metadata.version("tvm-farm")
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([version, components]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": f"pkg:pypi/tvm-farm@{version}",
                "name": "tvm-farm",
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
    }


def make_page(packages: list[Package]) -> str:
    """Return docs/licences.md: each licence with its packages."""
    lines = [
        "# Licences of dependencies",
        "",
        "tvm-farm is under [Apache-2.0](../LICENSE). Its wheel contains none of these packages. Unicorn, under the",
        "GPL, runs in a process of its own ([ADR 0032](adr/0032-simulated-boards-run-their-own-code.md)). `make",
        "sbom` writes this page from `requirements/` and the packages' metadata, and `dist/sbom.cdx.json` with",
        "versions and hashes. `deploy/release/licences.yaml` completes and corrects the metadata.",
        "",
        *(f"- `requirements/{file}`: {purpose}" for file, purpose in LOCKED.items()),
        "",
        "| licence | packages |",
        "|---|---|",
    ]
    licences = sorted({package.licence for package in packages})
    for licence in licences:
        lines.append(f"| {licence} | {', '.join(each.name for each in packages if each.licence == licence)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="where the CycloneDX document is written")
    out = parser.parse_args().out
    packages = read_packages()
    PAGE.write_text(make_page(packages), encoding="utf-8")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(make_document(packages), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
