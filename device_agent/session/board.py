"""The board that an agent serves: its tree, type, clocks and sensors, the same for every session.

One measurement is in `session/measurement.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from device_agent import board_types, protocol
from device_agent.board_types import detect
from device_agent.clocks.client import HelperClient
from device_agent.clocks.controller import Controller
from device_agent.clocks.platform import Platform
from device_agent.errors import AgentError, SensorError
from device_agent.platforms import evidence, gpu
from device_agent.platforms.board_time import BoardTime, HostTime
from device_agent.power import energy, sampler
from device_agent.power.calibrate import measure_sensors
from device_agent.power.meter import MeterRail, add_meter
from device_agent.power.sensors import PowerSensors, find_sensors
from device_agent.protocol import (
    MeasureSpec,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    PowerSpec,
    PowerTrace,
    RunSpec,
)
from device_agent.sysfs import Tree
from device_agent.worker.plan import Emulator, HostPace, LoadError, Marks, Pace

DEFAULT_TYPE = "local"
# How long to watch the power sensors: the slowest known one changes every 0.42 s, and a few changes are needed.
_SENSOR_LOOK_S = 2.0


class Simulation(Protocol):
    """What a virtual board has in place of hardware. `sensors` holds its sensors' files, also as of the past.

    `architecture` is that of the code it emulates; "" for code of this machine.
    """

    @property
    def sensors(self) -> Tree: ...

    @property
    def time(self) -> BoardTime: ...

    @property
    def architecture(self) -> str: ...

    def use_gpu(self, folder: Path | None, facts: board_types.BoardType | None) -> None:
        """Set the folder of the GPU's parts for forked processes."""

    def begin_session(self) -> None:
        """Prepare this process, which serves one client."""

    def make_pace(
        self, board: Board, spec: MeasureSpec | RunSpec, content: Sequence[bytes], time: BoardTime, limit_s: float
    ) -> Pace:
        """The board's pace for `spec` with `content`, within `limit_s` of the worker's `time`."""

    def find_emulator(self, board: Board, spec: MeasureSpec | RunSpec, program: bytes) -> Emulator | None:
        """The emulator for a program that is not this machine's code."""

    def find_interpreter(self, program: Path) -> list[str]:
        """What stands before a program that is not this machine's code. Raises LoadError without it."""


class Board:
    """The agent's board and its limits. `board_type` None: from the device tree, else `local`.

    `access` writes clocks; without it nothing can be pinned. A virtual board has a `simulation`. `programs` are those
    that clients may run besides models; None: any, also what they send.
    """

    def __init__(
        self,
        name: str,
        board_type: str | None,
        version: str,
        tree: Tree,
        access: HelperClient | None = None,
        max_library_bytes: int = 512 << 20,
        types: Mapping[str, board_types.BoardType] | None = None,
        meter: str = "",
        simulation: Simulation | None = None,
        programs: Collection[Path] | None = None,
    ) -> None:
        """Read what the board is. Raises ProtocolError for an invalid board-type file, SensorError for a command of a
        `meter` that cannot be read.
        """
        known = board_types.load_board_types() if types is None else types
        detected = detect(tree, known)
        self.name = name
        self.detected_type = detected.name if detected else ""
        self.board_type = board_type or self.detected_type or DEFAULT_TYPE
        self.version = version
        self.tree = tree
        self.max_library_bytes = max_library_bytes
        self._programs = None if programs is None else {each.resolve() for each in programs}
        self.facts = facts = known.get(self.board_type) or detected
        self.platform = Platform.discover(tree, facts, access)
        self.access = access
        self.controller = Controller(self.platform, access) if access is not None else None
        self.simulation = simulation
        self.time: BoardTime = simulation.time if simulation else HostTime()
        self._sensor_tree = simulation.sensors if simulation else tree
        self._meter = MeterRail(meter) if meter else None
        self.power = self._find_power()
        self.sensor_infos = self.power.infos
        gpu, memory = self.platform.gpu, self.platform.memory
        self.evidence = evidence.Sensors(
            tree,
            facts.thermal.ignore if facts else (),
            gpu.read_hz if gpu else None,
            memory.read_hz if memory else None,
            gpu.read_load if gpu else None,
        )
        self.marks = Marks()
        # Objects that workers inherit at the fork, and that are not pickled.
        self.shared = (tree, self._sensor_tree, self.evidence, self.marks)
        self.point: OperatingPoint | None = None
        self._machine = evidence.Machine(tree)

    @property
    def key(self) -> str:
        """The board's key at the tracker."""
        return f"{self.board_type}/{self.name}"

    def _find_power(self) -> PowerSensors:
        found = find_sensors(self._sensor_tree, self.facts, self.access)
        return found if self._meter is None else add_meter(found, self._meter)

    def look_again(self) -> None:
        """Where no total is known, measure sensors that came, or began to give values, since the last look."""
        found = self.power if self.power.total_rails else self._find_power()
        for name in set(found.rails) - set(self.power.rails):
            with contextlib.suppress(SensorError):
                found.read(name)
                self.power = found
                self.measure_sensors()
                break

    def measure_sensors(self) -> None:
        """Measure each power sensor's update period and step; takes up to 2 s."""
        self.open_meter()
        with self.time.look(_SENSOR_LOOK_S) as ticker:
            self.sensor_infos = measure_sensors(self.power, _SENSOR_LOOK_S, ticker, ticker.sleep)
        if self._meter is not None:
            self._meter.close()  # sessions start their own: a device has one reader

    def open_meter(self) -> None:
        """Start the external meter's program where there is one and it does not run; call it before a trace."""
        if self._meter is not None:
            self._meter.open()

    def describe(self) -> protocol.Description:
        """Describe the board, read from the machine now."""
        description = self._machine.describe(self.name, self.board_type, self.version)
        notes = [*self.platform.notes, *description.notes]
        if self.detected_type and self.detected_type != self.board_type:
            notes.append(f"registered as {self.board_type}, but its device tree says {self.detected_type}")
        if not self.power.rails:
            notes.append("no power sensor that can be read")
        if self.simulation is not None and self.simulation.architecture:
            # Other engines would run this machine's code, which says nothing about the board.
            own = (protocol.Engine.RELAX_VM, protocol.Engine.KERNEL)
            engines = tuple(each for each in description.engines if each in own)
            description = dataclasses.replace(description, architecture=self.simulation.architecture, engines=engines)
        return dataclasses.replace(
            description,
            rails=self.power.rails,
            thermal_zones=self.evidence.thermal_zones,
            detected_type=self.detected_type,
            clocks=self.read_clocks(),
            sensors=self.sensor_infos,
            total_rails=self.power.total_rails,
            notes=tuple(notes),
        )

    def read_clocks(self) -> protocol.Clocks:
        """Read all clocks, their holder, and whether they can be trusted."""
        if self.controller is not None:
            return self.controller.show()
        return Controller.read(self.platform)

    def pin(self, point: OperatingPoint) -> PinReport:
        """Hold the board at `point`. Never raises."""
        if self.controller is None:
            return PinReport(
                PinStatus.UNAVAILABLE, "this agent has no clock helper; see docs/howto/clocks-and-power.md"
            )
        report = self.controller.pin(point)
        self.point = self.controller.held
        return report

    def unpin(self) -> PinReport:
        """Release: restore the clocks from before the first pin. Never raises."""
        self.point = None
        if self.controller is None:
            return PinReport(PinStatus.OK, "nothing was held")
        return self.controller.unpin()

    def reassert(self) -> str:
        """Verify a held point; return what moved and could not be restored, "" for nothing."""
        if self.controller is None or self.point is None:
            return ""
        try:
            self.controller.check()
        except AgentError as error:
            return str(error)
        return ""

    def powered(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Keep the device powered for a block, if this agent may: no power gating of a GPU."""
        if device != protocol.GPU or self.controller is None:
            return contextlib.nullcontext()
        return self.controller.gpu_powered()

    def unsafe(self) -> str:
        """Why the clocks cannot be trusted; "" if they can, or without a pin."""
        if self.access is None:
            return ""
        with contextlib.suppress(AgentError, OSError):
            return self.access.status().unsafe
        return ""

    def place(self, cluster: str) -> tuple[int, ...]:
        """CPUs for a worker's threads; empty: the kernel chooses. Raises BadPointError."""
        cpus = self.platform.affinity(cluster)
        return () if not cluster and set(cpus) >= set(self.platform.hotplug.read_online()) else cpus

    def pace(self, spec: MeasureSpec | RunSpec, content: Sequence[bytes], time: BoardTime, limit_s: float) -> Pace:
        """The board's pace for `spec` with `content`, within `limit_s` of the worker's `time`."""
        if self.simulation is None:
            return HostPace()
        return self.simulation.make_pace(self, spec, content, time, limit_s)

    def find_emulator(self, spec: MeasureSpec | RunSpec, program: bytes) -> Emulator | None:
        """The emulator, if the program is code for this virtual board and not for this machine; else None."""
        return self.simulation.find_emulator(self, spec, program) if self.simulation else None

    def admit_program(self, program: Path, device: str, *, was_sent: bool) -> list[str]:
        """Return what stands before a program to run it here. Raises LoadError for one that this board does not run."""
        if self._programs is not None and (was_sent or program.resolve() not in self._programs):
            allowed = ", ".join(sorted(map(str, self._programs))) or "none"
            raise LoadError(f"this board's owner allows no other programs than models and these: {allowed}")
        if self.simulation is None:
            return []
        if device == protocol.GPU:
            raise LoadError("a simulated board has no GPU that programs can use")
        return self.simulation.find_interpreter(program)

    def use_gpu(self, folder: Path | None) -> None:
        """Set the folder of the GPU's parts for forked processes; None: what came with the agent."""
        if self.simulation is None:
            gpu.use_folder(folder, self.facts)
        else:
            self.simulation.use_gpu(folder, self.facts)

    def pinned_hz(self) -> dict[int, int]:
        """Held clocks in Hz, by core."""
        if self.point is None:
            return {}
        clusters = {domain.name: domain.cpus for domain in self.platform.clusters}
        return {cpu: hz for name, hz in self.point.cpu_freq_hz.items() for cpu in clusters.get(name, ())}

    def watch_power(self, spec: PowerSpec) -> PowerTrace:
        """Sample the power sensors; blocks for `spec.seconds`, plus a margin for late sensors."""
        self.open_meter()
        before = self.evidence.read()
        window = None
        samples: dict[str, tuple[tuple[float, float], ...]] = {}
        if self.power.rails:
            # Sensors lag: values for the window's edges appear a little before and after.
            margin_s = energy.plan_margin(self.sensor_infos)
            look_s = spec.seconds + 2 * margin_s
            with self.time.look(look_s) as ticker:
                start_s = ticker() + margin_s
                trace = sampler.collect(self.power, look_s, spec.rate_hz, ticker, ticker.sleep)
            window = energy.integrate(trace, start_s, start_s + spec.seconds, self.power, self.sensor_infos)
            samples = trace.updates(start_s)
        return PowerTrace(window, samples, before, self.evidence.read(), self.name, self.tree.simulated)

    def sign(self, outcome: Outcome) -> Outcome:
        """Add the board's name to the outcome."""
        return dataclasses.replace(outcome, board=self.name, agent_version=self.version, simulated=self.tree.simulated)
