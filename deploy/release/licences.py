"""Write docs/licences.md: the licences of the packages that requirements/ pins.

They come from the packages' own metadata, and from licences.yaml beside this file where that is silent or wrong.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "licences.md"
# File and its purpose, in the order of the page.
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
    """One pinned package."""

    name: str
    licence: str


def read_packages() -> list[Package]:
    """Return every pinned package with its licence. Raises SystemExit naming those whose licence is unknown."""
    names = set()
    for file in LOCKED:
        text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
        names |= set(re.findall(r"(?m)^([a-z0-9.-]+)==", text))
    said = yaml.safe_load((pathlib.Path(__file__).with_name("licences.yaml")).read_text(encoding="utf-8"))
    packages = [Package(name, find_licence(name, said)) for name in sorted(names)]
    if unknown := [package.name for package in packages if not package.licence]:
        raise SystemExit(f"no licence is known of {', '.join(unknown)}; say it in deploy/release/licences.yaml")
    return packages


def find_licence(name: str, said: Mapping[str, Mapping[str, str]]) -> str:
    """Return an SPDX expression; empty where the metadata has none."""
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


def make_page(packages: list[Package]) -> str:
    """Return docs/licences.md: each licence with its packages."""
    lines = [
        "# Licences of dependencies",
        "",
        "tvm-farm is under [Apache-2.0](../LICENSE). Its wheel contains none of these packages. Unicorn, under the",
        "GPL, runs in a process of its own ([ADR 0032](adr/0032-simulated-boards-run-their-own-code.md)). `make",
        "sbom` writes this page from `requirements/` and the packages' metadata, and `dist/sbom.cdx.json` with",
        "versions and hashes of `all.txt`. `deploy/release/licences.yaml` completes and corrects the metadata.",
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


if __name__ == "__main__":
    PAGE.write_text(make_page(read_packages()), encoding="utf-8")
