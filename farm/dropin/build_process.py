"""A compiler that stays warm: one candidate at a time, for one script. Started by `builder`."""

from __future__ import annotations

import functools
import os

from device_agent.protocol import Status
from farm.processes.partners import Parent


def main(parent: Parent) -> None:
    """Serve until the script is gone. Messages: `(module JSON, target)`, answered by `(library or None, reason)`."""
    from farm.search import builder, tvm_env

    # A compiler in the middle of its work hears no signal, and leaves nothing behind but memory.
    parent.on_stop = functools.partial(os._exit, 1)
    tvm_env.load_compiler()
    parent.send()
    while message := parent.receive():
        status, library, reason = builder.try_to_build(*message)
        parent.send(library, f"not the candidate's fault: {reason}" if status is Status.FARM_ERROR else reason)
