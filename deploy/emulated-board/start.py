"""Become this checkout's device-agent on the emulated board: the same process, so that signals and pids are its own.

Sets up what the emulator does not let the agent do for itself; the root comes from `root.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import root

# From linux/prctl.h. Survives exec, but not fork.
_PR_SET_CHILD_SUBREAPER = 36
# A Nano's memory, for each process.
MEMORY_BYTES = 4 << 30
# The core of Nano and TX2: what it lacks is an illegal instruction here as it is there.
CPU = "cortex-a57"
BOARD_TYPE = "jetson-nano"


def main(argv: Sequence[str] | None = None) -> int:  # noqa: RET503  exec does not return
    """Start the agent; return an exit code only if that is impossible: 1 not built, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="start",
        usage="start [--root DIR] [-- OPTIONS OF device-agent serve]",
        description="Start this checkout's device-agent on the emulated board.",
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="the board's root (default: what `build` makes)")
    parser.add_argument("options", nargs="*", metavar="OPTIONS", help=f"default: --virtual {BOARD_TYPE}")
    options = parser.parse_args(argv)
    try:
        folder = root.require_root(options.root)
    except root.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    serve = list(options.options)
    if not any(option.split("=")[0] in ("--board-type", "--virtual", "--root") for option in serve):
        serve = ["--virtual", BOARD_TYPE, *serve]

    # The emulator supports neither for the agent. It ignores an address space limit, since its own memory counts; this
    # one surrounds it and keeps the host safe. The agent adopts processes that its sessions leave behind.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    environment = {"QEMU_CPU": CPU} | os.environ
    environment |= {"PYTHONPATH": str(root.CHECKOUT), "PYTHONNOUSERSITE": "1"}
    program = "farm.virtual" if any(each.startswith("--virtual") for each in serve) else "device_agent"
    command = [str(folder / root.INTERPRETER), "-m", program, "serve", *serve]
    os.execve(command[0], command, environment)  # noqa: S606  no shell


if __name__ == "__main__":
    sys.exit(main())
