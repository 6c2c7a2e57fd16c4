"""What a virtual board has in place of hardware: its time, the cost of its code, its GPU's driver."""

from __future__ import annotations

import collections
import dataclasses
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_agent import protocol
from device_agent.board_types import BoardType
from device_agent.platforms.board_time import BoardTime
from device_agent.protocol import MeasureSpec, RunSpec
from device_agent.session.board import Board
from device_agent.worker import limits
from device_agent.worker.plan import LoadError
from farm.virtual import gpu_time, lapse, pace
from farm.virtual.emulated.runs import Emulator, is_for_board

# Debian's cross compiler has aarch64's C library there.
_LIBRARIES = "/usr/aarch64-linux-gnu"


class SimulatedHardware:
    """See `device_agent.session.board.Simulation`. `work_folder` caches the cost of programs (`work.py`).

    `emulator` runs the board's own code instead of this machine's.
    """

    def __init__(self, tree: Any, work_folder: Path | None, emulator: Emulator | None = None) -> None:
        self._tree, self._work_folder, self._emulator = tree, work_folder, emulator
        self.sensors = lapse.LookBack(tree)
        self.time: BoardTime = lapse.find_time(tree, self.sensors)
        self.architecture = "aarch64" if emulator else ""
        # Runs by content. Sessions are forked, so each counts for itself.
        self._runs: collections.Counter[str] = collections.Counter()

    def use_gpu(self, folder: Path | None, facts: BoardType | None) -> None:
        """Set the folder of the GPU's parts for forked processes."""
        gpu_time.use_folder(folder, facts)

    def begin_session(self) -> None:
        """Have stock clients' code timed as the board's."""
        pace.set_pace(self._tree)

    def make_pace(
        self, board: Board, spec: MeasureSpec | RunSpec, content: Sequence[bytes], time: BoardTime, limit_s: float
    ) -> pace.Pace:
        """See `Simulation`."""
        host_cores = min(limits.thread_count(spec.limits), len(os.sched_getaffinity(0)))
        emulator = self.find_emulator(board, spec, content[0])
        cores = str(host_cores) if emulator is None else f"emulated {emulator.tasks} {sorted(emulator.core.items())}"
        gpu = board.facts.gpu if board.facts else None
        key = pace.name_content(spec, content, cores, f"{gpu.arch} x {gpu.processors}" if gpu else "")
        self._runs[key] += 1
        return pace.Pace(
            self._tree,
            time,
            spec.limits.cluster,
            host_cores,
            limit_s,
            self._work_folder,
            key,
            self._runs[key],
            on_gpu=spec.device == protocol.GPU,
            core=emulator.core if emulator else None,
            # Nothing is known of a program's memory traffic.
            core_share=1.0 if isinstance(spec, RunSpec) and spec.command is not None else None,
        )

    def find_emulator(self, board: Board, spec: MeasureSpec | RunSpec, program: bytes) -> Emulator | None:
        """Return the emulator for aarch64 code, with the cores that `spec` may use."""
        if self._emulator is None or spec.device == protocol.GPU or not is_for_board(program):
            return None
        online = len(board.platform.affinity(spec.limits.cluster))
        core = self._emulator.cores.get(spec.limits.cluster, self._emulator.core)
        return dataclasses.replace(self._emulator, core=core, tasks=max(1, min(spec.limits.threads or online, online)))

    def find_interpreter(self, program: Path) -> list[str]:
        """See `Simulation`: QEMU's user-mode emulation for aarch64 programs, of which it finds the libraries."""
        with program.open("rb") as file:
            head = file.read(64)
        if not head.startswith(b"\x7fELF") or not is_for_board(head) or platform.machine() == "aarch64":
            return []
        found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
        if found is None:
            raise LoadError("an aarch64 program on a simulated board needs QEMU: install qemu-user on this machine")
        return [found, "-L", _LIBRARIES] if Path(_LIBRARIES).is_dir() else [found]
