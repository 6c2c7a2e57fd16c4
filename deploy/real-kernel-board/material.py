"""What a board with a real kernel is made from: the distribution's arm64 root, its kernel, and that kernel's headers.

Standard library only. Nothing here knows boards; what is done with it is said in `image.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import sys
from pathlib import Path

import foreign

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import debian
from debian import BuildError

# On the host, by the program that shows they are there.
HOST_PACKAGES = {
    "qemu-system-aarch64": "qemu-system-arm",
    "qemu-img": "qemu-utils",
    "qemu-aarch64-static": "qemu-user-static",
    "mmdebstrap": "mmdebstrap",
    "arch-test": "arch-test",
    "dtc": "device-tree-compiler",
    "depmod": "kmod",
    "cpio": "cpio",
    "zstd": "zstd",
    "make": "make",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "mke2fs": "e2fsprogs",
    "ssh-keygen": "openssh-client",
}
# On the board.
PACKAGES = (
    *("systemd", "systemd-sysv", "udev", "dbus", "openssh-server", "sudo", "python3", "iproute2", "kmod"),
    *("busybox-static", "procps", "util-linux"),
)
_UNWANTED = ("man", "doc", "locale", "info", "lintian", "bash-completion")
_DEBOOTSTRAP_TIMEOUT_S = 1500.0
_DRIVER = "drivers/hwmon/ina3221.c"


@dataclasses.dataclass(frozen=True)
class Material:
    """A folder with `root.tar.zst`, `ina3221.c`, `modules` as a kernel's package has them, `vmlinuz`, and `headers`."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root.tar.zst"

    @property
    def driver(self) -> Path:
        return self.folder / "ina3221.c"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def kernel_version(self) -> str:
        """As `uname -r` says it on the board."""
        return (self.folder / "version").read_text().strip()

    @property
    def modules(self) -> Path:
        """A root with `lib/modules/VERSION` in it."""
        return self.folder / "kernel"

    @property
    def headers(self) -> Path:
        """A root with `usr/src/linux-headers-VERSION` in it."""
        return self.folder / "headers"


def find_missing() -> list[str]:
    """The host's packages that are not installed."""
    # A user's PATH may lack the system's folders.
    path = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
    return [package for program, package in HOST_PACKAGES.items() if shutil.which(program, path=path) is None]


def require_possible() -> None:
    """Raise BuildError where the material cannot be made on this machine, with any packages installed."""
    debian.require_distribution("the board with a real kernel")
    if reason := foreign.find_obstacle():
        raise BuildError(f"the arm64 root cannot be made here: {reason}")


def compute_key() -> str:
    """What the material is made from, as a short hash: this file and how packages are fetched."""
    files = (Path(__file__), Path(foreign.__file__), Path(debian.__file__))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def fetch(folder: Path, scratch: Path) -> Material:
    """Fetch and unpack everything into `folder`. Raises BuildError."""
    require_possible()
    made = Material(folder)
    (scratch / "apt").mkdir()
    apt = debian.Apt(scratch / "apt", ["arm64", "amd64"])
    debian.say("fetching the distribution's arm64 kernel (210 MB)")
    image = apt.find_dependency("linux-image-arm64", r"linux-image-\S+-arm64")
    version = image.removeprefix("linux-image-")
    series = ".".join(version.split(".")[:2])
    headers = (f"linux-headers-{version}", f"linux-headers-{version.removesuffix('-arm64')}-common")
    archives = apt.fetch(image, *headers, f"linux-kbuild-{series}:amd64", f"linux-source-{series}")
    for archive in archives:
        name = archive.name.split("_")[0]
        debian.unpack(archive, {image: made.modules, f"linux-source-{series}": scratch}.get(name, made.headers))
        archive.unlink()
    (made.modules / "boot" / f"vmlinuz-{version}").rename(made.kernel)
    source = scratch / "usr/src" / f"linux-source-{series}.tar.xz"
    inside = f"linux-source-{series}/{_DRIVER}"
    # tar reads the whole archive to its end unless an option says that there is one such file.
    extract = ["tar", "-C", str(scratch), "--occurrence=1", "-xf", str(source), inside]
    debian.run(extract, f"the kernel's source has no {_DRIVER}", debian.FETCH_TIMEOUT_S)
    (scratch / inside).rename(made.driver)
    source.unlink()
    _make_root(made.root, apt.sources, scratch)
    (folder / "version").write_text(version + "\n")
    return made


def _make_root(path: Path, sources: Path, scratch: Path) -> None:
    debian.say("making the arm64 root (two minutes of processor time)")
    command = [sys.executable, str(Path(foreign.__file__)), "mmdebstrap", "--quiet", "--skip=check/qemu", "--mode=root"]
    command += ["--variant=minbase", "--architectures=arm64", f"--include={','.join(PACKAGES)}"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _UNWANTED]
    command += [f"--aptopt={line}" for line in _read_proxies()]
    command += [debian.CODENAME, str(path), str(sources)]
    debian.run(command, "the arm64 root cannot be made", _DEBOOTSTRAP_TIMEOUT_S, {"TMPDIR": str(scratch)})


def _read_proxies() -> list[str]:
    """How this machine's apt reaches its sources, where that is not directly."""
    text = debian.run(["apt-config", "dump"], "apt's configuration cannot be read", debian.FETCH_TIMEOUT_S)
    return [line for line in text.splitlines() if line.startswith("Acquire::") and "proxy" in line.lower()]
