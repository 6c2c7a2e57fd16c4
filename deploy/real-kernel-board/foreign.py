"""Run a command where the kernel starts arm64 programs by QEMU's user-mode emulation: foreign.py COMMAND [ARGUMENTS].

In user, mount and process namespaces of its own, so the host gets no foreign format. Needs root and Linux 6.7, the
first that gives each user namespace a binfmt_misc. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import NoReturn

EMULATOR = Path("/usr/bin/qemu-aarch64-static")
LEAST_KERNEL = (6, 7)
# From linux/sched.h and linux/mount.h.
_NEW_NAMESPACES = 0x00020000 | 0x10000000 | 0x20000000  # mount, user, process
_PRIVATE = 0x4000 | 0x40000
# Owners of a distribution's files are below this; 65534 is the overflow user.
_IDS = 65536
_FORMATS = "/proc/sys/fs/binfmt_misc"
# An ELF file for AArch64 (e_machine 183), with any padding, OS ABI and kind of program. F: the
# emulator is opened now, so that it need not lie in the root.
_MAGIC = rb"\x7fELF\x02\x01\x01" + rb"\x00" * 9 + rb"\x02\x00\xb7\x00"
_MASK = rb"\xff" * 7 + rb"\x00" + rb"\xff" * 8 + rb"\xfe\xff\xff\xff"
_FORMAT = b":aarch64:M::" + _MAGIC + b":" + _MASK + b":" + os.fsencode(EMULATOR) + b":F"
_libc = ctypes.CDLL(None, use_errno=True)


def find_obstacle() -> str:
    """Empty, or why no such namespaces can be had here."""
    numbers = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if os.geteuid() != 0:
        return "it takes root"
    if numbers < LEAST_KERNEL:
        return f"it takes Linux {'.'.join(map(str, LEAST_KERNEL))} or newer; this is {os.uname().release}"
    if "binfmt_misc" not in Path("/proc/filesystems").read_text():
        return "this kernel has no binfmt_misc"
    return ""


def main(command: list[str]) -> int:
    """Run the command; return its exit code."""
    unshared, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _enter(command, unshared[1], mapped[0])
    os.close(unshared[1])
    if os.read(unshared[0], 1):
        # Every id is itself: files get the owners that they are to have. Only a parent outside may say so.
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 0 {_IDS}")
        os.write(mapped[1], b"1")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _enter(command: list[str], unshared: int, mapped: int) -> NoReturn:
    _check(_libc.unshare(_NEW_NAMESPACES), "no namespaces")
    os.write(unshared, b"1")
    os.read(mapped, 1)
    os.setgid(0)
    os.setuid(0)
    child = os.fork()  # the first process of the new process namespace
    if child != 0:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    _check(_libc.mount(b"none", b"/", None, _PRIVATE, None), "mounts cannot be private")
    _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None), "no /proc")
    _check(_libc.mount(b"binfmt_misc", os.fsencode(_FORMATS), b"binfmt_misc", 0, None), "no binfmt_misc")
    with open(f"{_FORMATS}/register", "wb", buffering=0) as register:  # noqa: PTH123  bytes in one write
        register.write(_FORMAT)
    os.execvp(command[0], command)  # noqa: S606  no shell


def _check(result: int, what: str) -> None:
    if result != 0:
        print(f"foreign: {what}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
