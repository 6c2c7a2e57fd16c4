"""Release what the checkout is: check that it may be, build, try the wheel, write notes from the changelog, and tag.

`release.py VERSION [--dry-run]`. A dry run does all but the tag. Nothing is sent anywhere: pushing the tag and
publishing what lies in dist/ are for a person.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Where the version stands, and how.
_PLACES = {
    "pyproject.toml": r'(?m)^version = "([^"]+)"',
    "farm/version.py": r'(?m)^__version__ = "([^"]+)"',
    "device_agent/__init__.py": r'(?m)^__version__ = "([^"]+)"',
}


def find_faults(root: pathlib.Path, version: str) -> list[str]:
    """Return why the checkout at `root` cannot be released as `version`; empty where it can."""
    faults = []
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        faults.append(f"{version!r} is no version such as 0.2.0")
    for place, pattern in _PLACES.items():
        found = re.search(pattern, (root / place).read_text(encoding="utf-8"))
        if found is None or found[1] != version:
            faults.append(f"{place} says {found[1] if found else 'no version'}")
    if not read_notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version):
        faults.append(f"CHANGELOG.md has nothing under [{version}]")
    if changed := _git(root, "status", "--porcelain"):
        faults.append(f"the tree is not clean: {', '.join(line[3:] for line in changed.splitlines()[:5])}")
    if _git(root, "tag", "--list", f"v{version}"):
        faults.append(f"the tag v{version} is there already")
    return faults


def read_notes(changelog: str, version: str) -> str:
    """Return the changelog's section of a version, without its heading."""
    found = re.search(rf"(?ms)^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog)
    return found[1].strip() if found else ""


def release(root: pathlib.Path, version: str, dry_run: bool) -> None:
    """See the module. Raises SystemExit with what is in the way; the tag is made last."""
    if faults := find_faults(root, version):
        raise SystemExit("\n".join([f"{version} cannot be released:", *(f"  {fault}" for fault in faults)]))
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    own = root / "deploy" / "release"
    _run(root, sys.executable, "-m", "hatchling", "build", "--directory", str(dist))
    [wheel] = dist.glob("*.whl")
    _run(root, sys.executable, str(own / "check.py"), str(wheel))
    _run(root, "make", "--no-print-directory", "sbom")
    if changed := _git(root, "status", "--porcelain"):
        raise SystemExit(f"not current, commit it first: {changed}")
    notes = read_notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    (dist / "NOTES.md").write_text(f"# tvm-farm {version}\n\n{notes}\n", encoding="utf-8")
    files = sorted(path for path in dist.iterdir() if path.name != "SHA256SUMS")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (dist / "SHA256SUMS").write_text(sums, encoding="utf-8")
    if dry_run:
        print(f"dist/ holds {version}; nothing was tagged")
        return
    _git(root, "tag", "--annotate", f"v{version}", "--message", f"tvm-farm {version}")
    print(f"dist/ holds {version}, tagged v{version}. Push the tag: git push origin v{version}")


def _git(root: pathlib.Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *words], check=True, capture_output=True, text=True, timeout=60
    ).stdout.rstrip()


def _run(root: pathlib.Path, *command: str) -> None:
    if code := subprocess.run(command, cwd=root, check=False, timeout=1800).returncode:
        raise SystemExit(f"{' '.join(command)} ended with {code}")


def main(words: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="all but the tag")
    options = parser.parse_args(words)
    release(ROOT, options.version, options.dry_run)


if __name__ == "__main__":
    main()
