"""Debian's own packages as material: this machine's apt asked for packages of any architecture, in a folder of its own.

Shared by the builds below `deploy/`. Standard library only. The host's package state is neither read nor changed but by
`install_packages`, which says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# The release whose packages are used; its Python, glibc and kernel belong together.
CODENAME = "bookworm"
FETCH_TIMEOUT_S = 900.0


class BuildError(Exception):
    """Something cannot be made or used; the text says why and what to do."""


class UnreachableError(BuildError):
    """The distribution's packages cannot be had from here, or not now; nothing is known to be wrong with the build."""


class Apt:
    """apt for one or more architectures, the first of which is the default, with all of its state in `folder`.

    Its configuration, keys and sources are the host's, the last without their limits on architectures. Raises
    UnreachableError where those do not answer.
    """

    def __init__(self, folder: Path, architectures: Sequence[str]) -> None:
        self.sources = folder / "sources" / "host.sources"
        for name in ("state/lists/partial", "cache/archives/partial", "sources"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        self.sources.write_text(read_sources(Path("/etc/apt")))
        settings = {
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": folder / "sources",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "APT::Architecture": architectures[0],
            "APT::Sandbox::User": "root",  # apt's own user may not enter a private folder
            "APT::Update::Error-Mode": "any",
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
        }
        lines = [f'{name} "{value}";' for name, value in settings.items()]
        # Hooks are for the host's own packages.
        cleared = ("APT::Architectures", "APT::Update::Pre-Invoke", "APT::Update::Post-Invoke")
        cleared += ("APT::Update::Post-Invoke-Success", "DPkg::Pre-Install-Pkgs", "DPkg::Post-Invoke")
        known = " ".join(f'"{name}";' for name in architectures)
        lines = [f"#clear {name};" for name in cleared] + lines + [f"APT::Architectures {{ {known} }};"]
        self._configuration = folder / "apt.conf"
        self._configuration.write_text("\n".join(lines) + "\n")
        self._archives = folder / "cache" / "archives"
        _fetch_lists("-c", str(self._configuration))

    def fetch_with_dependencies(self, *packages: str) -> list[Path]:
        """The archives of packages and of all that they depend on. Raises BuildError."""
        options = ("-qq", "-y", "install", "--download-only")
        self._call("the packages cannot be fetched", "apt-get", *options, *packages)
        return sorted(self._archives.glob("*.deb"))

    def fetch(self, *packages: str) -> list[Path]:
        """The archives of these packages alone, as `name` or `name:architecture`. Raises BuildError."""
        self._call("the packages cannot be fetched", "apt-get", "-qq", "download", *packages, folder=self._archives)
        return sorted(self._archives.glob("*.deb"))

    def find_dependency(self, package: str, pattern: str) -> str:
        """The package that `package` depends on and whose name matches. Raises BuildError."""
        text = self._call("the packages cannot be looked up", "apt-cache", "depends", package)
        if found := re.search(rf"(?m)^\s*Depends: ({pattern})\s*$", text):
            return found[1]
        raise BuildError(f"{package} depends on nothing that is called like {pattern}")

    def _call(self, failure: str, program: str, *arguments: str, folder: Path | None = None) -> str:
        return run([program, "-c", str(self._configuration), *arguments], failure, FETCH_TIMEOUT_S, folder=folder)


def read_sources(folder: Path) -> str:
    """The release's own sources below apt's configuration `folder`, for every architecture, in apt's deb822 form."""
    stanzas = []
    for path in sorted([*folder.glob("sources.list.d/*.sources"), *folder.glob("sources.list.d/*.list")]):
        stanzas += _read_stanzas(path)
    if (folder / "sources.list").exists():
        stanzas += _read_stanzas(folder / "sources.list")
    texts = []
    for stanza in stanzas:
        types, suites, components = (stanza.get(name, "").split() for name in ("types", "suites", "components"))
        suites = [suite for suite in suites if re.fullmatch(rf"{CODENAME}([-/](updates|security))?", suite)]
        if not suites or "deb" not in types or "main" not in components:
            continue
        if stanza.get("enabled", "yes").lower() in ("no", "false", "0", "off"):
            continue
        kept = {"Types": "deb", "URIs": stanza.get("uris", ""), "Suites": " ".join(suites), "Components": "main"}
        kept |= {name: stanza[name.lower()] for name in ("Signed-By", "Trusted") if name.lower() in stanza}
        texts.append("".join(f"{name}: {value}\n" for name, value in kept.items()))
    if not texts:
        raise BuildError(f"apt knows no source of {CODENAME}'s `main`; see {folder}/sources.list.d")
    return "\n".join(texts)


def _read_stanzas(path: Path) -> list[dict[str, str]]:
    """The sources of a file in either of apt's forms, as fields with names in small letters."""
    text = path.read_text()
    stanzas = []
    if path.suffix == ".sources":
        for block in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
            fields = re.findall(r"(?m)^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", block)
            stanzas.append({name.lower(): value for name, value in fields})
        return stanzas
    for line in text.splitlines():
        if found := re.match(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)", line):
            settings, uri, suite, components = found.groups(default="")
            stanza = {"types": "deb", "uris": uri, "suites": suite, "components": components}
            stanza |= {k.lower(): v.replace(",", " ") for k, v in re.findall(r"(\S+?)=(\S+)", settings)}
            stanzas.append(stanza)
    return stanzas


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a package's files into `folder`. Raises BuildError."""
    run(["dpkg-deb", "-x", str(archive), str(folder)], f"{archive.name} cannot be unpacked", FETCH_TIMEOUT_S)


def require_distribution(what: str) -> None:
    """Raise BuildError unless this is the release whose packages `what` is made from."""
    release = {}
    with contextlib.suppress(OSError):
        text = Path("/etc/os-release").read_text()
        release = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', text))
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if release.get("VERSION_CODENAME") != CODENAME or missing:
        raise BuildError(
            f"this is {release.get('PRETTY_NAME', 'an unknown system')}; {what} is made from the packages "
            f"of Debian 12 ({CODENAME}) on such a system. Build it there, for instance in a container"
        )


def _fetch_lists(*options: str) -> None:
    """Have apt read its sources' lists of packages. Raises UnreachableError where they do not answer."""
    try:
        run(["apt-get", *options, "-qq", "update"], "apt's package lists cannot be fetched", FETCH_TIMEOUT_S)
    except BuildError as error:
        raise UnreachableError(str(error)) from None


def install_packages(packages: Sequence[str]) -> None:
    """Install packages on this machine with its own apt. Raises BuildError."""
    names = ", ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BuildError(f"{names} can be installed by root on Debian only")
    say(f"installing {names}")
    install = ["apt-get", "-qq", "-y", "--no-install-recommends", "install", *packages]
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # the second keeps services from starting
    try:
        run(install, "", FETCH_TIMEOUT_S, quiet)
    except BuildError:  # lists that are missing or name versions that are gone
        _fetch_lists()
        run(install, f"{names} cannot be installed", FETCH_TIMEOUT_S, quiet)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, so that two builds do not meet; the kernel lets go of it however we end."""
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        deadline = time.monotonic() + FETCH_TIMEOUT_S
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another build of {folder} has not ended after {FETCH_TIMEOUT_S:g} s") from None
                if not said:
                    say("waiting for another build of the same folder")
                    said = True
                time.sleep(0.2)
        yield


def run(
    command: Sequence[str | Path],
    failure: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Run a command; return its stdout. Raises BuildError with `failure` and the command's last words."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{failure}: {command[0]} took longer than {timeout_s:g} s") from None
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise BuildError(f"{failure}:\n  " + "\n  ".join(words[-6:]))
    return done.stdout


def say(text: str) -> None:
    """A line on stderr behind the name of what is built, which is the script's folder."""
    print(f"{Path(sys.argv[0]).resolve().parent.name}: {text}", file=sys.stderr, flush=True)
