"""Make the root of an emulated aarch64 board: the distribution's own arm64 packages, and the agent's pinned wheels.

Standard library only. `build` and `start` beside this file are the commands; what runs in the root is not decided here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import debian
from debian import BuildError

CHECKOUT = Path(__file__).resolve().parents[2]
QEMU = "qemu-aarch64-static"
QEMU_PACKAGE = "qemu-user-static"
# The same emulator with plug-ins, of which the instruction counter is one. In 7.2 it ends processes of several threads
# that are forked by another such process, as the agent's are ("qemu_plugin_vcpu_init_hook: assertion failed").
COUNTING_QEMU = "qemu-aarch64"
COUNTING_QEMU_PACKAGE = "qemu-user"

# Of the release that `debian` names; JetPack 4 boards need a Python of their own as well.
PYTHON_VERSION = "3.11"
GLIBC_MINOR = 36
# apt adds what these depend on.
PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6")
SITE = f"usr/local/lib/python{PYTHON_VERSION}/dist-packages"

# 240 MB that the agent never loads: it runs with TVM_USE_RUNTIME_LIB=1.
LEFT_OUT = ("tvm/lib/libtvm_compiler.so",)

# 115 MB of wheels, 25 MB of packages and lists, 200 MB unpacked; everything lies there at once for a moment.
NEEDED_BYTES = 500 << 20
CHECK_TIMEOUT_S = 300.0

STAMP = "emulated-board.json"
INTERPRETER = "usr/bin/board-python"
# The kernel runs this file through the host's shell and the emulator, so nothing needs to be registered with it
# (binfmt_misc). Python takes its own name from -0: sys.executable is this file, and what starts it is emulated too.
INTERPRETER_TEXT = f"""#!/bin/sh
self=$(readlink -f -- "$0")
root=${{self%/{INTERPRETER}}}
unset LD_PRELOAD LD_LIBRARY_PATH PYTHONHOME
exec {QEMU} -L "$root" -0 "$self" "$root/usr/bin/python{PYTHON_VERSION}" "$@"
"""
# A Nano's (JetPack 4). QEMU shows programs what the root has under a path before what the host has; without this one
# ONNX Runtime finds an x86 processor there, and crashes.
CPUINFO = "".join(
    f"""processor\t: {number}
model name\t: ARMv8 Processor rev 1 (v8l)
BogoMIPS\t: 38.40
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd07
CPU revision\t: 1

"""
    for number in range(4)
)
# Importing fills the bytecode caches as well, so that the agent's first start is as quick as the next.
CHECK = """
import platform, sys
import cloudpickle, ctypes, ml_dtypes, numpy, prometheus_client, psutil, sqlite3, ssl, tornado, tvm.rpc, yaml, zlib
assert platform.machine() == "aarch64", platform.machine()
assert float((numpy.eye(64) @ numpy.ones((64, 64))).sum()) == 4096.0
print(sys.executable)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="build", description="Make the root of an emulated aarch64 board.")
    parser.add_argument("--root", type=Path, metavar="DIR", help="where (default: a cache folder of the user)")
    parser.add_argument("--install-qemu", action="store_true", help="install the emulator if it is missing; as root")
    parser.add_argument("--check", action="store_true", help="build nothing: print the root, or fail saying what lacks")
    options = parser.parse_args(argv)
    try:
        if options.check:
            print(require_root(options.root))
            return 0
        if options.install_qemu and None in (shutil.which(QEMU), shutil.which(COUNTING_QEMU)):
            debian.install_packages([QEMU_PACKAGE, COUNTING_QEMU_PACKAGE])
        require_qemu()
        print(build(options.root))
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def require_root(folder: Path | None = None) -> Path:
    """The finished root at `folder` or the default place. Raises BuildError where that or the emulator is missing."""
    require_qemu()
    key = compute_key()
    root = (folder or default_root(key)).absolute()
    if (found := find_key(root)) != key:
        state = "is out of date" if found else "is not built"
        raise BuildError(f"the emulated board's root {root} {state}; run deploy/emulated-board/build")
    return root


def compute_key() -> str:
    """What the root is made from, as a short hash: this file, how packages are fetched, and the pins."""
    recipe = Path(__file__).read_bytes() + Path(debian.__file__).read_bytes()
    return hashlib.sha256(recipe + read_pins().encode()).hexdigest()[:16]


def default_root(key: str) -> Path:
    """The user's cache folder for roots made from these inputs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tvm-farm" / "emulated-board" / key


def find_key(root: Path) -> str | None:
    """The key of the finished root at `root`, None if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((root / STAMP).read_text())["key"])
    return None


def build(folder: Path | None = None) -> Path:
    """Make the root at `folder` or the default place, unless it is there already; return its path.

    It appears under its name only when it is complete and has run. Raises BuildError, OSError.
    """
    key = compute_key()
    root = (folder or default_root(key)).absolute()
    root.parent.mkdir(parents=True, exist_ok=True)
    with debian.locked(root):
        if find_key(root) == key:
            return root
        if root.exists() and find_key(root) is None and any(root.iterdir()):
            raise BuildError(f"{root} exists and is no emulated board; name another folder with --root")
        debian.require_distribution("the emulated board")
        free = shutil.disk_usage(root.parent).free
        if free < NEEDED_BYTES:
            raise BuildError(f"{free >> 20} MiB free at {root.parent}; {NEEDED_BYTES >> 20} MiB are needed")
        prefix = f".{root.name}."
        for left in root.parent.glob(f"{prefix}*.building"):  # of a build that was killed: the lock is ours
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=prefix, suffix=".building", dir=root.parent) as folder:
            new = Path(folder) / "root"
            new.mkdir()
            (Path(folder) / "wheels").mkdir()
            packages = unpack_packages(new, Path(folder) / "apt")
            wheels = unpack_wheels(new, Path(folder) / "wheels")
            (new / "proc").mkdir()
            (new / "proc" / "cpuinfo").write_text(CPUINFO)
            interpreter = new / INTERPRETER
            interpreter.write_text(INTERPRETER_TEXT)
            interpreter.chmod(0o755)
            debian.say("trying it: importing TVM under emulation")
            setting = {"TVM_USE_RUNTIME_LIB": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": ""}
            trial = [str(interpreter), "-c", CHECK]
            debian.run(trial, "the new root does not work", CHECK_TIMEOUT_S, setting)
            stamp = {"key": key, "packages": packages, "wheels": wheels}
            (new / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
            if root.exists():
                root.rename(Path(folder) / "old")
            new.rename(root)
    return root


def unpack_packages(root: Path, folder: Path) -> list[str]:
    """Fetch the packages with apt and unpack them into `root`; return their names with version and architecture."""
    debian.say("fetching the distribution's arm64 packages (25 MB)")
    archives = debian.Apt(folder, ["arm64"]).fetch_with_dependencies(*PACKAGES)
    for archive in archives:
        debian.unpack(archive, root)
    if not (root / f"usr/bin/python{PYTHON_VERSION}").exists():
        raise BuildError(f"the packages hold no python{PYTHON_VERSION}: {', '.join(a.name for a in archives)}")
    return [archive.name.removesuffix(".deb") for archive in archives]


def read_pins() -> str:
    """The agent's pins with their hashes, as they apply to the root's Python."""
    text = (CHECKOUT / "requirements" / "agent.txt").read_text()
    pin = r"(?m)^([a-z0-9.-]+==[^ ]+)(?: ; ([^\\\n]+))? \\\n((?:    --hash=.*\n?)+)"
    chosen = [f"{name} \\\n{hashes.rstrip()}\n" for name, marker, hashes in re.findall(pin, text) if _applies(marker)]
    return "".join(chosen)


def _applies(marker: str) -> bool:
    """Whether a pin is for the root's Python on Linux; pip would ask about the interpreter that it runs in."""
    python = tuple(map(int, PYTHON_VERSION.split(".")))
    for clause in filter(None, marker.strip().split(" and ")):
        found = re.fullmatch(r"(python_full_version|sys_platform) (==|!=|<=|>=|<|>) '([^']+)'", clause.strip())
        if not found:
            raise BuildError(f"requirements/ holds a marker that is not understood here: {clause}")
        name, operator, value = found.groups()
        if name == "sys_platform":
            holds = (value == "linux") == (operator == "==")
        else:
            wanted = tuple(map(int, value.removesuffix(".*").split(".")[:2]))
            comparisons = {"==": python == wanted, "!=": python != wanted, "<": python < wanted, ">": python > wanted}
            holds = comparisons.get(operator, python == wanted or (python < wanted) == (operator == "<="))
        if not holds:
            return False
    return True


def unpack_wheels(root: Path, folder: Path) -> list[str]:
    """Fetch the pinned aarch64 wheels with pip and unpack them into `root`; return their names."""
    pins = folder / "pins.txt"
    pins.write_text(read_pins())
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in range(GLIBC_MINOR, 16, -1)] + ["manylinux2014_aarch64"]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON_VERSION}"]
    command += [f"--platform={platform}" for platform in platforms]
    debian.say("fetching the agent's aarch64 wheels (115 MB)")
    failure = "the aarch64 wheels cannot be fetched (pip comes with `make setup`)"
    debian.run([*command, "--dest", str(folder), "--requirement", str(pins)], failure, debian.FETCH_TIMEOUT_S)
    wheels = sorted(folder.glob("*.whl"))
    debian.say("unpacking")
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name not in LEFT_OUT]
            wheel.extractall(root / SITE, names)
    return [path.name for path in wheels]


def require_qemu() -> None:
    """Raise BuildError where the emulator is not installed."""
    if shutil.which(QEMU) is None:
        hint = f"apt-get install {QEMU_PACKAGE}, or as root deploy/emulated-board/build --install-qemu"
        raise BuildError(f"{QEMU} is not installed: {hint}")


if __name__ == "__main__":
    sys.exit(main())
