"""A user's order of a sweep: model, clocks to vary, measurement; stored with the sweep, so that it can be resumed.

Frequencies stay as typed until a board reports its tables. Before one is taken, `preview` plans the whole; the board
itself decides on its grid (`farm.sweep.run.session`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import CPU, EVERY_CLUSTER, Clocks, DomainClocks
from farm.crew.choice import TargetPlan, describe_type, plan_place, plan_target
from farm.crew.visits import IDLE_SHARE
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.points import requests
from farm.points.grid import Coupling, GridRequest, find_reboot_modes, plan_grid
from farm.points.requests import ALL, find_clocks
from farm.points.values import Goal, Grid, Objective
from farm.programs.order import ProgramOrder
from farm.search import gpus
from farm.sweep.fit.pick import require_power
from farm.sweep.plan.adaptive import ANCHOR_EVERY
from farm.types.documents import BoardInfo

MIN_WINDOW_S, MAX_WINDOW_S = 0.1, 600.0
_CLUSTER_MARK = "="
COMPILED = "compiled"
# In place of a list: the clock is left as the board has it.
UNHELD = "none"
_NO_SENSOR = "this board has no power sensor: latency only, energy is not known"


@dataclasses.dataclass(frozen=True)
class SweepOrder:
    """One sweep as ordered. Clocks as typed; empty: not varied.

    `cpu_freqs` are lists for all clusters or `CLUSTER=LIST`. `device` is the boards' processor or GPU. On a GPU the
    memory clock varies with the GPU's unless `mem_freqs` is given. A `program` is in the model's place, its settings
    are the variants.
    """

    model: str
    shapes: tuple[str, ...] = ()
    variants: tuple[str, ...] = (COMPILED,)
    batches: tuple[int, ...] = (1,)
    cpu_freqs: tuple[str, ...] = ()
    cores: str = ""
    gpu_freqs: str = ""
    mem_freqs: str = ""
    power_modes: str = ""
    window_s: float = 5.0
    exhaustive: bool = False
    budget_points: int | None = None
    seed: int = 0
    device: str = CPU
    program: ProgramOrder | None = None

    def __post_init__(self) -> None:
        if not MIN_WINDOW_S <= self.window_s <= MAX_WINDOW_S:
            raise UsageError(f"--window must be {MIN_WINDOW_S:g} s to {MAX_WINDOW_S:g} s, not {self.window_s:g} s")
        if self.budget_points is not None and self.budget_points < 1:
            raise UsageError(f"--budget-points must be at least 1, not {self.budget_points}")
        if self.exhaustive and self.budget_points is not None:
            raise UsageError("--exhaustive and --budget-points contradict each other", "Give one of them.")

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SweepOrder:
        """Read an order that `dataclasses.asdict` wrote."""
        lists = {name: tuple(document[name]) for name in ("shapes", "variants", "batches", "cpu_freqs")}
        # Older sweeps have options that went since.
        kept = {name: value for name, value in document.items() if name not in ("repeat", "ambient_c")}
        program = document.get("program")
        return cls(**kept | lists | {"program": ProgramOrder.from_dict(program) if program else None})

    @property
    def series(self) -> tuple[tuple[str, int], ...]:
        """The variant and batch of each series."""
        return tuple((variant, batch) for batch in self.batches for variant in self.variants)

    @property
    def varies(self) -> bool:
        """Whether the user named clocks to vary."""
        memory = self.mem_freqs.strip() not in ("", UNHELD)
        return bool(self.cpu_freqs or self.cores or self.gpu_freqs or memory or self.power_modes)

    @property
    def names_modes(self) -> bool:
        """Whether the user named power modes."""
        return self.power_modes.strip().lower() not in ("", ALL)

    @property
    def names_values(self) -> bool:
        """Whether the user named particular values, not just all there are."""
        cpus = (text.rpartition(_CLUSTER_MARK)[2] for text in self.cpu_freqs)
        named = (*cpus, self.gpu_freqs, self.mem_freqs, self.power_modes)
        return any(text.strip().lower() not in ("", ALL, UNHELD) for text in named) or bool(self.cores)


@dataclasses.dataclass(frozen=True)
class SweepPlace:
    """The boards. `name` None: any of the type; `boards` is their maximum, None: as many as are useful."""

    board_type: str
    name: str | None = None
    boards: int | None = None
    wait_s: float = 60.0


def plan_order(order: SweepOrder, clocks: Clocks, coupling: Coupling) -> tuple[Grid, list[str]]:
    """Return the grid of a board with these clocks, and messages about it.

    By default all clocks of the device are varied: the CPU's, or the GPU's and the memory's. Raises UsageError.
    """
    if order.device != CPU and clocks.gpu and clocks.gpu.available_hz:
        gpu_freqs = order.gpu_freqs if order.varies else ALL
        mem_freqs = ALL if gpu_freqs and not order.mem_freqs and _can_hold_memory(clocks) else order.mem_freqs
        order = dataclasses.replace(order, gpu_freqs=gpu_freqs, mem_freqs=mem_freqs)
    has_tables = any(cluster.available_hz for cluster in clocks.clusters)
    others = order.gpu_freqs or order.mem_freqs or order.power_modes
    if not has_tables and not order.names_values and not others:
        note = "this board has no CPU clocks that can be held: it is measured as it is"
        return plan_grid(clocks, GridRequest(), coupling), [note]
    cpu = _read_cpu(order.cpu_freqs, clocks) if order.varies else {EVERY_CLUSTER: ()}
    modes = tuple(word.strip() for word in order.power_modes.split(",") if word.strip()) if order.names_modes else ()
    request = GridRequest(
        cpu_freqs_hz=cpu,
        cores=requests.parse_core_sets(order.cores) if order.cores else None,
        gpu_freqs_hz=_read_domain(order.gpu_freqs, clocks.gpu),
        memory_freqs_hz=_read_domain(order.mem_freqs, clocks.memory),
        power_modes=modes if order.power_modes else None,
    )
    notes = _find_silent(cpu, clocks) if has_tables else []
    reboot = find_reboot_modes(clocks, coupling) if request.power_modes == () else ()
    notes += [
        f"power mode {name} takes a reboot from {clocks.power_mode} and is left out; `sudo nvpmodel -m "
        f"{coupling.modes[name].number}` on the board sets it, then sweep it by name"
        for name in reboot
    ]
    return plan_grid(clocks, request, coupling), notes


def _can_hold_memory(clocks: Clocks) -> bool:
    """Whether the board sets its memory clock: who may not read it may not hold it. A type's file has no readings."""
    memory, gpu = clocks.memory, clocks.gpu
    return bool(memory and memory.available_hz and (memory.current_hz or not (gpu and gpu.current_hz)))


def _find_silent(cpu: Mapping[str, tuple[int, ...]] | None, clocks: Clocks) -> list[str]:
    """List messages about clusters that are meant, but not named, and report no frequencies."""
    return [
        f"the CPU cluster {cluster.name} does not say which frequencies it has (it is offline), and is left as it is"
        for cluster in clocks.clusters
        if cpu is not None and EVERY_CLUSTER in cpu and cluster.name not in cpu and not cluster.available_hz
    ]


def explain_lost_rails(about: Mapping[str, Any]) -> str:
    """Name the rails of a board's description that give no values, with the reasons; "" for none."""
    # The words are of `device_agent/power/calibrate.py`.
    lost = (each for each in about.get("sensors", ()) if each["note"].startswith("no energy"))
    return "; ".join(f"{each['rail']}: {each['note']}" for each in lost)


def require_goal(goal: Goal, has_power: bool, objective_named: bool, why: str = "") -> tuple[Goal, list[str]]:
    """Return the goal for this board: without total power (`why`) and an explicit objective, the least latency.

    Raises UsageError where power was asked for and there is no sensor.
    """
    note = _NO_SENSOR + (f" ({why})" if why else "")
    if has_power or not goal.needs_power:
        return goal, [] if has_power else [note]
    if not objective_named:
        goal = dataclasses.replace(goal, objective=Objective.LATENCY)
    require_power(False, goal, why=why)
    return goal, [note]


def _read_cpu(texts: tuple[str, ...], clocks: Clocks) -> dict[str, tuple[int, ...]] | None:
    if not texts:
        return None
    tables = {cluster.name: cluster.available_hz for cluster in clocks.clusters}
    everything = tuple(sorted({hz for table in tables.values() for hz in table}))
    read: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, mark, values = text.rpartition(_CLUSTER_MARK)
        name = name.strip() if mark else EVERY_CLUSTER
        if name in read:
            raise UsageError(f"--cpu-freqs says twice what {name} is to run at", "Put the frequencies into one list.")
        # Without a table nothing is looked up: the grid reports the error.
        read[name] = _read_list(values, tables.get(name, everything))
    return read


def _read_domain(text: str, domain: DomainClocks | None) -> tuple[int, ...] | None:
    return _read_list(text, domain.available_hz if domain else ()) if text.strip() not in ("", UNHELD) else None


def _read_list(text: str, available_hz: tuple[int, ...]) -> tuple[int, ...]:
    return () if text.strip().lower() == ALL else requests.parse_freqs(text, available_hz)


@dataclasses.dataclass(frozen=True)
class SweepPreview:
    """`boards` are those of which any may be used, none: this machine. `grid` is None where no clocks are known yet."""

    board_type: BoardType
    boards: tuple[str, ...]
    simulated: bool
    target: TargetPlan
    grid: Grid | None
    notes: tuple[str, ...]
    points: int | None
    visits: int | None

    def to_dict(self, order: SweepOrder) -> dict[str, Any]:
        """Return what `--dry-run --json` prints; `points` and `visits` are upper bounds, None where unknown."""
        return {
            "model": order.model,
            "board_type": self.board_type.name,
            "boards": list(self.boards),
            "simulated": self.simulated,
            "series": [{"variant": variant, "batch": batch} for variant, batch in order.series],
            "grid": [point.key for point in self.grid.points] if self.grid else None,
            "points": self.points,
            "visits": self.visits,
            "window_s": order.window_s,
            "exhaustive": order.exhaustive,
            "notes": list(self.notes),
        }


def preview(
    order: SweepOrder, where: SweepPlace, board_type: BoardType, goal: Goal, named: bool, rows: Sequence[BoardInfo]
) -> SweepPreview:
    """Plan a sweep from the store's data on its boards. `rows` are those of `store.boards.fetch`.

    `named`: the user named the objective. Raises UsageError for what no board here can do, UnavailableError and
    BoardUnsafeError where an operator has to act first.
    """
    kind = gpus.require_device(board_type, order.device)
    host_cores = len(os.sched_getaffinity(0))
    boards: tuple[str, ...] = ()
    if where.name is not None or not kind.host_is_board:
        boards, simulated, target = plan_place(rows, kind, where.name, host_cores)
    else:
        simulated, target = False, plan_target(kind, {}, host_cores)
    about: Mapping[str, Any] = next((row.description for row in rows if row.name in boards and row.description), {})
    if order.program is not None:
        _require_program(order, order.program, {**describe_type(kind, "", simulated), **about})
    clocks = find_clocks(kind, about)
    if clocks is None:
        return SweepPreview(
            kind, boards, simulated, target, None, ("the clocks are known once a board is there",), None, None
        )
    grid, notes = plan_order(order, clocks, Coupling.of(kind))
    if about:
        why = explain_lost_rails(about)
        # Rails that are only missing may have come since: the board itself is asked.
        has_power = bool(about.get("total_rails")) or bool(kind.power.total and not why)
        _, more = require_goal(goal, has_power, named, why)
        notes += more
    visits = count_visits(order, grid)
    return SweepPreview(kind, boards, simulated, target, grid, tuple(notes), count_points(order, grid), visits)


def _require_program(order: SweepOrder, program: ProgramOrder, about: Mapping[str, Any]) -> None:
    """Refuse a program that a board with this description cannot run. Raises UsageError."""
    if about["simulated"] and order.device != CPU:
        raise UsageError(
            "simulated boards do not run programs for the GPU", "Take a real board, or --device cpu for one of the CPU."
        )
    program.require_fit(about)


def count_points(order: SweepOrder, grid: Grid) -> int:
    """Return the most points of a grid that are measured."""
    return min(len(grid), order.budget_points or len(grid))


def count_visits(order: SweepOrder, grid: Grid) -> int:
    """Return the most visits to a grid; the anchor is visited again after every `ANCHOR_EVERY` others, and last."""
    points = count_points(order, grid)
    return (points + points // ANCHOR_EVERY + (points > 1)) * len(order.series)


def describe(found: SweepPreview, order: SweepOrder) -> list[str]:
    """Describe the plan in lines for a terminal."""
    where = ", ".join(found.boards) or "this machine"
    series = ", ".join(f"{variant} x{batch}" if batch > 1 else variant for variant, batch in order.series)
    lines = [
        f"{order.model} on {found.board_type.name}{' (simulated)' if found.simulated else ''}: {where}",
        f"code: {series}",
    ]
    if found.grid is not None and found.points is not None and found.visits is not None:
        least = "all are measured" if order.exhaustive else "fewer where a fit is sure of the rest"
        lines.append(
            f"at most {found.points} of {len(found.grid)} operating points, {least}; at most {found.visits} visits"
        )
        if not found.simulated:
            minutes = found.visits * order.window_s * (1 + IDLE_SHARE) / 60
            lines.append(
                f"at most {minutes:.0f} min on one board, with windows of {order.window_s:g} s and their idle baseline"
            )
        else:
            lines.append(
                "simulated boards keep their own time: a visit takes here as long as one inference in the emulator"
            )
    return lines + list(found.notes)
