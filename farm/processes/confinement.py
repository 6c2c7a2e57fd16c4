"""Drop this process's rights for good before it reads foreign input: files, network, other processes.

Uses resource limits, Landlock (since Linux 5.13) and a seccomp filter; none needs root. A kernel without Landlock
leaves the user's files accessible; one without seccomp is refused.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from farm.errors import UnavailableError

# Address space that libraries map without writing: some 2 GiB each for TVM and PyTorch, and threads' stacks.
_MAPPED_BYTES = 16 << 30
# The largest file: a model of protobuf's maximal size, with its weights beside it.
_FILE_BYTES = 8 << 30
# Files that Python and its libraries read outside their own folders; none is a user's, and none of /proc is about other
# processes.
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/bin", "/opt", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime", "/etc/passwd",
    "/etc/group", "/etc/os-release", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
    "/proc/sys", "/sys/devices/system", "/sys/fs/cgroup", "/dev/urandom", "/dev/zero",
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

# include/uapi/linux/landlock.h: rights by ABI version, and call numbers (the same on x86-64 and Arm).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _RIGHTS[3] | _RIGHTS[5]
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_NETWORK, _SCOPES = 0b11, 0b11  # binding and connecting TCP (ABI 4); abstract sockets and signals (ABI 6)

# Refused: sockets, access to other processes (kill, tkill, ptrace, process_vm_*, pidfd_*), fork and vfork, leaving the
# process group that is killed (setsid, setpgid), io_uring (does all of that unseen), bpf, mounts, keys.
_MODERN = (425, 426, 427, 424, 434, 438)  # io_uring_*, pidfd_send_signal, pidfd_open, pidfd_getfd
_CLONE3 = 435
_CLONE_THREAD = 0x10000
_X32 = 0x40000000  # x86-64's second numbers for the same calls


@dataclasses.dataclass(frozen=True)
class _Calls:
    """System call numbers of one architecture; `arch` is its AUDIT_ARCH (include/uapi/linux/audit.h)."""

    arch: int
    refused: tuple[int, ...]
    clone: int
    tgkill: int


_CALLS = {
    "x86_64": _Calls(
        0xC000003E,
        (41, 42, 62, 200, 101, 310, 311, 57, 58, 112, 109, 321, 165, 272, 308, 250, 248, 249, *_MODERN),
        56,
        234,
    ),
    "aarch64": _Calls(
        0xC00000B7, (198, 203, 129, 130, 117, 270, 271, 157, 154, 280, 40, 97, 268, 219, 217, 218, *_MODERN), 220, 131
    ),
}


def limit(memory_bytes: int, cpu_s: float) -> None:
    """Limit this process's memory, CPU time and files, permanently."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, int(cpu_s) + 1)
    _limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    _limit(resource.RLIMIT_DATA, memory_bytes)
    _limit(resource.RLIMIT_AS, memory_bytes + _MAPPED_BYTES)


def confine(folder: Path) -> None:
    """Confine writes to `folder`, reads to it and the programs themselves; forbid sockets and other processes.

    Call with one thread; it is irreversible. Raises UnavailableError if the kernel cannot filter system calls.
    """
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise _unavailable("PR_SET_NO_NEW_PRIVS")
    _restrict_files(folder)
    _filter_calls()


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _restrict_files(folder: Path) -> None:
    abi = int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    if abi <= 0:
        return
    rights = sum(value for since, value in _RIGHTS.items() if since <= abi)
    attributes = struct.pack("=QQQ", rights, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    attributes = attributes[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise _unavailable("Landlock")
    try:
        for path in (*map(Path, _SYSTEM), *_program_folders()):
            _allow(ruleset, path, _READING)
        _allow(ruleset, Path("/dev/null"), _READING | _WRITE_FILE)
        _allow(ruleset, folder, rights)
        if _libc.syscall(_RESTRICT_SELF, ruleset, 0):
            raise _unavailable("Landlock")
    finally:
        os.close(ruleset)


def _program_folders() -> Iterator[Path]:
    """Folders of Python, its packages and the farm's modules and data; of a checkout not the folder around them."""
    ours = Path(__file__).resolve().parents[1]
    for name in ("farm", "device_agent", "inventory"):
        yield ours.parent / name
    for text in {sys.prefix, sys.base_prefix, sys.exec_prefix, *(p for p in sys.path if "site-packages" in p)}:
        yield Path(text)
    for text in sys.path:
        if Path(text).name.startswith("python3") or text.endswith(("lib-dynload", ".zip", "dist-packages")):
            yield Path(text)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this machine
        return
    try:
        if not path.is_dir():
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        if _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0):
            raise _unavailable(f"Landlock, for {path}")
    finally:
        os.close(descriptor)


def _filter_calls() -> None:
    """Refuse system calls with EPERM; threads may be created and signal each other, processes may not."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise _unavailable(f"seccomp on {platform.machine()}")
    program = [_load(4), _jump_equal(calls.arch, 1, 0), _give(0), _load(0)]
    if platform.machine() == "x86_64":
        program += [_jump_at_least(_X32, 0, 1), _give(errno.EPERM)]
    # glibc then falls back to clone, whose flags can be filtered.
    program += [_jump_equal(_CLONE3, 0, 1), _give(errno.ENOSYS)]
    for number in calls.refused:
        program += [_jump_equal(number, 0, 1), _give(errno.EPERM)]
    program += [_jump_equal(calls.clone, 0, 4), _load(16), _jump_set(_CLONE_THREAD, 1, 0), _give(errno.EPERM), _ALLOW]
    program += [_jump_equal(calls.tgkill, 0, 3), _load(16), _jump_equal(os.getpid(), 1, 0), _give(errno.EPERM), _ALLOW]
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0):
        raise _unavailable("seccomp")


# Instructions of classic BPF over struct seccomp_data: number at 0, architecture at 4, low half of the first argument
# at 16 (both architectures are little-endian).
def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    return _instruction(0x20, 0, 0, offset)


def _jump_equal(value: int, if_true: int, if_false: int) -> bytes:
    return _instruction(0x15, if_true, if_false, value)


def _jump_at_least(value: int, if_true: int, if_false: int) -> bytes:
    return _instruction(0x35, if_true, if_false, value)


def _jump_set(value: int, if_true: int, if_false: int) -> bytes:
    return _instruction(0x45, if_true, if_false, value)


def _give(number: int) -> bytes:
    """End the process for 0, else refuse the call with that error."""
    return _instruction(0x06, 0, 0, 0x80000000 if number == 0 else 0x00050000 | number)


_ALLOW = _instruction(0x06, 0, 0, 0x7FFF0000)


def _unavailable(what: str) -> UnavailableError:
    return UnavailableError(
        f"this kernel does not let the farm confine a process ({what}: {os.strerror(ctypes.get_errno())})",
        "Foreign files are read in a confined process only; a container may need another seccomp profile.",
    )
