"""A virtual board's kernel files in this process: permissions, faults, nvpmodel, and the simulation's own files.

`files_*.py` list the kernel files; `server.py` and `client.py` serve them over a socket. The simulation's own files,
open to unprivileged users unless noted:
- `/sys/virtual/load` (write): this user's load, `{"cluster": NAME, "cores": BUSY, "memory": 0..1, "gpu": 0..1,
  "ttl_s": SECONDS}`, all optional; `{}` is idle. It ends with the user's connection.
- `/sys/virtual/fault` (write: root): see `faults.py`. Reading lists the active faults.
- `/sys/virtual/pace` and `/sys/virtual/clocks` (read): for `pace.py`.
- `/sys/virtual/time` (read): the board's time in s, and whether it is live. If not (write):
  `{"pass_s": SECONDS}` lets it pass, `{"begin": true}` restarts it (`VirtualBoard.begin_anew`).
- `/sys/virtual/energy` (read): the time in s and every rail's exact energy since the start, in J.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from collections.abc import Hashable, Sequence
from typing import Any

from device_agent.sysfs import read_text
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.clocks import Load, refuse
from farm.virtual.faults import Faults
from farm.virtual.files import Files
from farm.virtual.files_clocks import add_cpu_files, add_gpu_files, add_memory_files
from farm.virtual.files_machine import add_machine_files, add_power_files, make_chips
from farm.virtual.parameters import GPU, MEMORY
from farm.virtual.power_modes import add_power_mode_files, run_nvpmodel
from farm.virtual.sensors import Noise

LOAD = "/sys/virtual/load"
FAULT = "/sys/virtual/fault"
PACE = "/sys/virtual/pace"
CLOCKS = "/sys/virtual/clocks"
ENERGY = "/sys/virtual/energy"
TIME = "/sys/virtual/time"
# A day: no request needs more.
_LONGEST_S = 86400.0
# Past values in one answer: some seconds of the fastest sensor.
_MOST_VALUES = 500
# Past any rounding of the time when a value changes.
_MOMENT_S = 1e-9
# JSON has no infinity.
_NEVER_S = 1e12
_DEBUG = "/sys/kernel/debug"


class Hardware:
    """What all users of one board share: its files, chips and faults."""

    def __init__(self, board: VirtualBoard) -> None:
        self.board = board
        self.noise = Noise(board.seed)
        self._boots = board.boots
        self._built: dict[frozenset[int], Files] = {}
        self.chips = make_chips(board)
        self.faults = Faults(board, lambda: self.chips)

    @staticmethod
    def of(board: VirtualBoard) -> Hardware:
        """The hardware of this board, created once."""
        if not isinstance(board.hardware, Hardware):
            board.hardware = Hardware(board)
        return board.hardware

    def files(self) -> Files:
        """The present files: hot-plug adds and removes some."""
        self.board.advance()
        if self._boots != self.board.boots:
            self._boots = self.board.boots
            self._built.clear()
            self.chips = make_chips(self.board)
        online = frozenset(self.board.online)
        if online not in self._built:
            self._built[online] = self._build()
        return self._built[online]

    def _build(self) -> Files:
        files, board = Files(), self.board
        add_machine_files(board, files)
        add_cpu_files(board, files, self.noise)
        add_gpu_files(board, files)
        add_memory_files(board, files)
        add_power_files(board, files, self.chips)
        add_power_mode_files(board, files)
        files.add(LOAD, lambda: "{}", lambda text: None)
        files.add(FAULT, lambda: "\n".join(self.faults.active), lambda text: None)
        files.add(PACE, self._describe_pace)
        files.add(CLOCKS, self._describe_clocks)
        files.add(ENERGY, self._describe_energy)
        files.add(TIME, self._describe_time, lambda text: None)
        return files

    def _describe_pace(self) -> str:
        """The facts that are constant while a worker runs."""
        board = self.board
        latency = board.parameters.latency
        slowdown = dict(latency.slowdown)
        highest = max(slowdown.values(), default=1.0)
        clusters = {
            cluster.name: {
                "cpus": cluster.cpus,
                "isolated": cluster.isolated,
                "core": cluster.core,
                "individual": board.individual.latency * self.faults.slowness,
                "slowdown": slowdown.get(cluster.name, highest) * board.individual.latency * self.faults.slowness,
                "reference_hz": cluster.clock.table[-1],
            }
            for cluster in board.clusters.values()
        }
        return json.dumps(
            {
                "seed": board.seed,
                "clusters": clusters,
                "memory_reference_hz": board.memory.table[-1] if board.memory else 0,
                "core_share": latency.core_share,
                "noise": latency.noise,
                "gpu": self._describe_gpu(),
                "timing_s": self.faults.timing_s,
            }
        )

    def _describe_gpu(self) -> dict[str, float | str]:
        """The facts for `gpu_time.py`; "stretch" is this board's slowdown relative to its type."""
        board, gpu = self.board, self.board.board_type.gpu
        if gpu is None:
            return {}
        return {
            "arch": gpu.arch,
            "processors": gpu.processors or 1,
            "memory_bytes_per_s": gpu.memory_bytes_per_s or 0.0,
            "stretch": board.individual.latency * self.faults.slowness,
            "highest_hz": gpu.freqs_hz[-1] if gpu.freqs_hz else 0,
        }

    def _describe_clocks(self) -> str:
        board = self.board
        clusters = {
            c.name: {"hz": board.acting_hz[c.name], "online": len(board.online_in(c))} for c in board.clusters.values()
        }
        gpu_hz, memory_hz = (board.acting_hz.get(name, 0) for name in (GPU, MEMORY))
        return json.dumps({"clusters": clusters, "memory_hz": memory_hz, "gpu_hz": gpu_hz})

    def _describe_energy(self) -> str:
        board = self.board
        drawn = {name: board.drawn_j(name) for name in (*board.rail_names, TOTAL)}
        return json.dumps({"time_s": board.advance(), "drawn_j": drawn})

    def _describe_time(self) -> str:
        return json.dumps({"now_s": self.board.advance(), "live": self.board.is_live})

    def pass_time(self, text: str) -> None:
        """Handle a write to `TIME`. Raises OSError (EINVAL)."""
        try:
            value = json.loads(text)
            if value == {"begin": True}:
                self.board.begin_anew()
                self.noise.begin_anew()
                self.faults.begin_anew()
                for chip in self.chips:
                    chip.begin_anew()
                return
            seconds = value["pass_s"]
            if len(value) != 1 or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_S:
                raise ValueError(f"pass_s is 0 to {_LONGEST_S:g}")
            self.board.let_pass(seconds)
        except (ValueError, TypeError, KeyError) as error:
            raise OSError(errno.EINVAL, f"not a time to pass: {error}", TIME) from error


class VirtualTree:
    """A `device_agent.sysfs.Tree` over a virtual board. `owner` sets its load (default: this tree)."""

    simulated = True

    def __init__(self, board: VirtualBoard, privileged: bool = True, owner: Hashable = None) -> None:
        self.board = board
        self.privileged = privileged
        self.hardware = Hardware.of(board)
        self._owner = owner if owner is not None else object()

    def read(self, path: str) -> str:
        self._answer()
        files, real = self._look_up(path)
        self.hardware.faults.check_read((path, real))
        file = files.file(real)
        if file.read is None or (file.private and not self.privileged):
            raise refuse(errno.EACCES, path)
        return self.hardware.faults.distort((path, real), file.read()).replace("\0", " ").strip()

    def write(self, path: str, text: str) -> None:
        if path == FAULT:
            if not self.privileged:
                raise refuse(errno.EACCES, FAULT)
            try:
                self.hardware.faults.inject(text)
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error), FAULT) from error
            return
        self._answer()
        files, real = self._look_up(path)
        if path == LOAD:
            self.board.set_load(self._owner, read_load(text, self.board))
            return
        if path == TIME:
            self.hardware.pass_time(text)
            return
        file = files.file(real)
        if file.write is None or not self.privileged:
            raise refuse(errno.EACCES, path)
        self.hardware.faults.check_write((path, real))
        with self.board.change():
            try:
                file.write(text.strip())
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None

    def past(self, path: str, at_s: float) -> list[list[Any]]:
        """The values of a sensor's file from `at_s` until now, each with its end time.

        Limited in number; the last is not the present value if there are more, or a later read fails. Raises what
        `read` raised then.
        """
        shown: list[list[Any]] = []
        now_s = self.board.advance()
        while True:
            try:
                with self.board.look_back(at_s) as until:
                    shown.append([self.read(path), min(until(), _NEVER_S)])
            except OSError:
                if not shown:
                    raise
                return shown
            until_s = shown[-1][1]
            if not at_s < until_s <= now_s or len(shown) == _MOST_VALUES:
                return shown
            at_s = until_s + _MOMENT_S

    def past_many(self, paths: Sequence[str], at_s: float) -> list[list[list[Any]] | None]:
        """As `past`, for several files; None for each that was unreadable then."""
        found: list[list[list[Any]] | None] = []
        for path in paths:
            try:
                found.append(self.past(path, at_s))
            except OSError:
                found.append(None)
        return found

    def let_pass(self, seconds: float) -> list[Any]:
        """Let time pass, as `TIME` does; return the time, `CLOCKS`, and how long that holds. Raises OSError."""
        self.write(TIME, json.dumps({"pass_s": seconds}))
        event_s = self.board.find_next_event_s()
        return [self.board.advance(), self.read(CLOCKS), _NEVER_S if event_s is None else event_s]

    def read_many(self, paths: Sequence[str]) -> list[str | None]:
        return [read_text(self, path) for path in paths]

    def names(self, folder: str) -> list[str]:
        self._answer()
        files, real = self._look_up(folder)
        base = real.rstrip("/")
        if self.hardware.faults.hides(real):
            raise refuse(errno.ENOENT, folder)
        return [name for name in files.names(real) if not self.hardware.faults.hides(f"{base}/{name}")]

    def exists(self, path: str) -> bool:
        self._answer()
        try:
            files, real = self._look_up(path)
        except OSError:
            return False
        return files.exists(real) and not self.hardware.faults.hides(real)

    def run(self, command: list[str]) -> str:
        """Run nvpmodel, the one tool of a virtual board. Raises OSError as `run_nvpmodel`."""
        self._answer()
        if not command or command[0].rpartition("/")[2] != "nvpmodel":
            raise refuse(errno.ENOENT, command[0] if command else "")
        self.board.advance()
        self.hardware.faults.check_write(("nvpmodel",))
        return run_nvpmodel(self.board, command[1:], self.privileged)

    def close(self) -> None:
        """Disconnect the user, which ends its load."""
        self.board.set_load(self._owner, None)

    def _look_up(self, path: str) -> tuple[Files, str]:
        files = self.hardware.files()
        real = files.resolve(path)
        if not self.privileged and (real + "/").startswith(_DEBUG + "/"):
            raise refuse(errno.EACCES, path)
        return files, real

    def _answer(self) -> None:
        self.board.advance()
        if self.hardware.faults.hangs:
            raise TimeoutError(errno.ETIMEDOUT, "the board does not answer")


def read_load(text: str, board: VirtualBoard) -> Load | None:
    """Parse a load from JSON; None for none. Raises OSError (EINVAL)."""
    try:
        value: dict[str, Any] = json.loads(text)
        if not value:
            return None
        ttl_s = float(value.pop("ttl_s", math.inf))
        load = Load(**value, expires_s=board.advance() + ttl_s)
        numbers = (load.cores, load.memory, load.gpu, *(load.wanted or (0, 0)))
        if load.cluster and load.cluster not in board.clusters:
            raise ValueError(f"no cluster {load.cluster!r}")
        if not all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers) or not ttl_s > 0:
            raise ValueError("numbers must be >= 0")
    except (ValueError, TypeError, AttributeError) as error:
        raise OSError(errno.EINVAL, f"not a load: {error}", LOAD) from error
    return dataclasses.replace(load, memory=min(load.memory, 1.0), gpu=min(load.gpu, 1.0))
