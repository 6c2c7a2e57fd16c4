"""Simulated watts and GPU latencies against those that others measured on real Jetsons; `--fit` fits the constants.

    python benchmarks/published_power.py [--data FOLDER] [--fit] [--chart FILE]

Without FOLDER only Xaviers are compared. It holds `tx2_gpu_rails.csv`, `tx2_cpu_over_idle.csv`, `tx2_frames.csv` and
`agx_orin_rails.csv`, or some of them; docs/fidelity.md names their sources and columns. A virtual board without spread
is set to each row's clocks, load and temperature. `--fit` needs all files: it prints the constants that fit the rows,
and how far off each row of the TX2's GPU is with constants fitted to the others. Without it nothing is learnt from rows
but, in `tx2_frames.csv`, each network's two times, from its three corners. `--chart` draws the watts.
"""

from __future__ import annotations

import collections
import copy
import csv
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import _machine
import numpy as np
import scipy.optimize
from matplotlib import pyplot

from device_agent.board_types import BoardType, load_board_types
from farm.virtual import gpu_time
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.clocks import Load
from farm.virtual.history import OwnClock

Row = Mapping[str, str]
# (row's name, figure, measured, simulated)
Pairs = list[tuple[str, str, float, float]]
TX2, ORIN = "jetson-tx2", "jetson-agx-orin-64gb"
RAILS = {
    "vdd_in_w": "VDD_IN",
    "vdd_sys_gpu_w": "VDD_SYS_GPU",
    "vdd_sys_soc_w": "VDD_SYS_SOC",
    "vdd_sys_cpu_w": "VDD_SYS_CPU",
    "vdd_sys_ddr_w": "VDD_SYS_DDR",
}
ORIN_RAILS = {
    "vdd_gpu_soc_w": "VDD_GPU_SOC",
    "vdd_cpu_cv_w": "VDD_CPU_CV",
    "vin_sys_5v0_w": "VIN_SYS_5V0",
    "vddq_vdd2_1v8ao_w": "VDDQ_VDD2_1V8AO",
    "total_w": TOTAL,
}
# Idle at the end of the log of `tx2_gpu_rails.csv`.
TX2_IDLE = dict(zip(RAILS.values(), (3.43, 0.23, 0.84, 0.30, 1.17), strict=True))
# Power modes of the AGX Orin: the board type's number, and the share of the GPU's TPCs (NVIDIA, Jetson Linux Developer
# Guide, Power Modes).
ORIN_MODES = {"maxn": (0, 1.0), "mode15w": (1, 3 / 8), "mode30w": (2, 0.5), "mode50w": (3, 1.0)}
# An 8-billion-parameter model in 4 bits is read once for each token.
BYTES_PER_TOKEN = 4.92e9
# Of a token where a draft model guesses and the large one checks several at once. Assumed.
SPECULATIVE = 0.42
# ResNet-50 in int8, batch 1, at the clocks of NVIDIA's own search: GPU Hz, memory Hz, wall W (MLPerf Inference v1.1,
# "MaxQ", Apache-2.0). On an Orin wall is 1.02 times the rails and 3.1 W; traffic of half the peak is assumed.
MLPERF = {
    "jetson-agx-xavier": (828_750_000, 1_600_000_000, 15.8),
    "jetson-xavier-nx": (803_250_000, 1_600_000_000, 10.6),
}
# How far the fit moves a constant from the start, as a factor.
_REACH = {"knee_hz": 1.6, "floor_v": 1.3}
STILL = {"capacitance": 0.0, "leakage": 0.0, "resistance": 0.0, "latency": 0.0, "sensor_gain": 0.0}


def watts(board_type: BoardType, set_up: Callable[[VirtualBoard], Load], at_c: float) -> dict[str, float]:
    """Every rail of a board without spread, and the total, as `set_up` leaves it, with the die at `at_c`."""
    board = VirtualBoard(
        dataclasses.replace(board_type, simulation={**board_type.simulation, "spread": STILL}), 0, OwnClock()
    )
    with board.change():
        load = set_up(board)
    board.set_load("row", load)
    piece = board.history.pieces[-1]
    names = (*board.rail_names, TOTAL)
    return {name: constant + per_c * at_c for name, (constant, per_c) in zip(names, piece.rails, strict=False)}


def pin(board: VirtualBoard, gpu_hz: int, memory_hz: int, cpu_hz: Mapping[str, int]) -> None:
    """Pin clocks; every core is online, and CPU clusters without one in `cpu_hz` stay at their lowest."""
    board.apply_power_mode(board.board_type.power_modes[0])
    for name, cluster in board.clusters.items():
        cluster.clock.set_governor("powersave")
        hz = cpu_hz.get(name, cluster.clock.table[0])
        cluster.clock.set_limits(hz, hz)
    assert board.gpu is not None
    assert board.memory is not None
    board.gpu.clock.set_limits(gpu_hz, gpu_hz)
    board.gpu.railgate = False
    board.memory.locked, board.memory.rate_hz = True, memory_hz


def compare_tx2_gpu(rows: Iterable[Row], board_type: BoardType) -> Pairs:
    """A network on the GPU, with one A57 core busy at its highest clock."""
    pairs: Pairs = []
    for row in rows:
        cores = float(row["cpu_busy_percent_sum"]) / 100

        def set_up(board: VirtualBoard, row: Row = row, cores: float = cores) -> Load:
            pin(board, int(row["gpu_hz"]), 1_866_000_000, {"a57": 2_035_200_000})
            return Load("a57", cores, float(row["emc_busy_percent"]) / 100, 1.0)

        found = watts(board_type, set_up, float(row["gpu_c"]))
        pairs += [(row["gpu_hz"], column, float(row[column]), found[rail]) for column, rail in RAILS.items()]
    return pairs


def compare_tx2_idle(board_type: BoardType) -> Pairs:
    def set_up(board: VirtualBoard) -> Load:
        pin(board, 1_300_500_000, 1_866_000_000, {})
        return Load()

    found = watts(board_type, set_up, 45.0)
    return [("idle", rail, watt, found[rail]) for rail, watt in TX2_IDLE.items()]


def compare_tx2_cpu(rows: Iterable[Row], board_type: BoardType) -> Pairs:
    """VDD_SYS_CPU above idle at the same clocks."""
    pairs: Pairs = []
    for row in rows:
        hz, cores, cluster = int(row["cpu_hz"]), int(row["cores"]), row["cluster"]

        def set_up(board: VirtualBoard, busy: int, hz: int = hz, cluster: str = cluster) -> Load:
            pin(board, 114_750_000, 1_866_000_000, {"a57": hz, "denver": hz})
            return Load(cluster, busy)

        busy, idle = (watts(board_type, lambda board, n=n: set_up(board, n), 45.0)["VDD_SYS_CPU"] for n in (cores, 0))
        name = f"{row['kernel']}, {cores} x {cluster} at {hz / 1e6:g} MHz"
        pairs.append((name, cluster, float(row["vdd_sys_cpu_w_over_idle"]), busy - idle))
    return pairs


def compare_orin(rows: Iterable[Row], board_type: BoardType) -> Pairs:
    """Idle, and a language model's decoding on the GPU, at a power mode's clocks, all pinned."""
    highest = board_type.gpu.memory_bytes_per_s if board_type.gpu else None
    assert highest
    pairs: Pairs = []
    for row in rows:
        mode_id, units = ORIN_MODES[row["mode"]]
        mode = next(mode for mode in board_type.power_modes if mode.id == mode_id)
        rate = float(row["tokens_per_s"]) * BYTES_PER_TOKEN * (SPECULATIVE if row["case"].startswith("spec") else 1.0)
        load = Load("a78-0", 0.5, min(1.0, rate / highest), units) if row["phase"] != "idle" else Load()

        def set_up(board: VirtualBoard, mode: Any = mode, load: Load = load) -> Load:
            board.apply_power_mode(mode)
            assert board.gpu is not None
            assert board.memory is not None
            for each in (*board.clusters.values(), board.gpu):
                each.clock.set_governor("performance")
            board.memory.locked, board.memory.rate_hz = True, board.memory.highest_hz
            board.gpu.railgate = False
            return load

        found = watts(board_type, set_up, 50.0)
        name = f"{row['mode']} {row['case']} {row['phase']}"
        pairs += [(name, column, float(row[column]), found[rail]) for column, rail in ORIN_RAILS.items()]
    return pairs


def compare_mlperf() -> Pairs:
    """The rails' total of Xavier boards, to which nothing is fitted, at one point each."""
    pairs: Pairs = []
    for name, (gpu_hz, memory_hz, wall_w) in MLPERF.items():

        def set_up(board: VirtualBoard, gpu_hz: int = gpu_hz, memory_hz: int = memory_hz) -> Load:
            pin(board, gpu_hz, memory_hz, {})
            return Load(cores=1, memory=0.5, gpu=1.0)

        pairs.append(
            (name, "total of a Xavier", (wall_w - 3.1) / 1.02, watts(load_board_types()[name], set_up, 50.0)[TOTAL])
        )
    return pairs


def compare_frames(rows: Iterable[Row]) -> Pairs:
    """Frames a second over those at both highest clocks; each network's two times are from three corner points."""
    by_network: dict[str, dict[tuple[int, int], float]] = collections.defaultdict(dict)
    for row in rows:
        by_network[row["network"]][int(row["gpu_hz"]), int(row["memory_hz"])] = float(row["frames_per_s"])
    pairs: Pairs = []
    for network, frames in by_network.items():
        top = max(frames, key=lambda clocks: clocks[0] * clocks[1])
        corners = [top, *(min(frames, key=lambda clocks, i=i: (clocks[i], -clocks[1 - i])) for i in (0, 1))]
        seconds = _time_of(top)

        def misses(logs: Any, corners: Any = corners, frames: Any = frames, seconds: Any = seconds) -> list[float]:
            return [float(np.log(seconds(*np.exp(logs), clocks) * frames[clocks])) for clocks in corners]

        fitted = np.exp(scipy.optimize.least_squares(misses, np.log([0.7 / frames[top], 0.5 / frames[top]])).x)
        whole = seconds(*fitted, top)
        for clocks, measured in frames.items():
            if clocks not in corners:
                name = f"{network} {clocks[0] / 1e6:g} MHz"
                pairs.append(
                    (name, f"{clocks[1] / 1e6:g} MHz", measured / frames[top], whole / seconds(*fitted, clocks))
                )
    return pairs


def _time_of(top: tuple[int, int]) -> Callable[[float, float, tuple[int, int]], float]:
    """The virtual board's time of a kernel, from its compute and memory time at the highest clocks, at other clocks."""
    facts = {"memory_bytes_per_s": 1e9, "stretch": 1.0}

    def seconds(compute_s: float, memory_s: float, clocks: tuple[int, int]) -> float:
        kernel = gpu_time.Kernel(compute_s * top[0], memory_s * 1e9 * gpu_time.REACHED)
        return gpu_time.compute_seconds([kernel], facts, clocks[0], clocks[1] / top[1])[0]

    return seconds


COMPARISONS: dict[str, Callable[[list[Row]], Pairs]] = {
    "tx2_gpu_rails.csv": lambda rows: compare_tx2_gpu(rows, load_board_types()[TX2]),
    "tx2_cpu_over_idle.csv": lambda rows: compare_tx2_cpu(rows, load_board_types()[TX2]),
    "tx2_frames.csv": compare_frames,
    "agx_orin_rails.csv": lambda rows: compare_orin(rows, load_board_types()[ORIN]),
}


def summarise(pairs: Pairs) -> dict[str, Any]:
    """Median and worst relative error for each figure, and each row's ratio of simulated to measured."""
    figures: dict[str, Any] = {}
    for figure in dict.fromkeys(figure for _, figure, _, _ in pairs):
        ratios = {name: simulated / measured for name, each, measured, simulated in pairs if each == figure}
        errors = [abs(ratio - 1) for ratio in ratios.values()]
        figures[figure] = {
            "rows": len(errors),
            "median_error": round(statistics.median(errors), 4),
            "worst_error": round(max(errors), 4),
            "simulated_over_measured": {name: round(ratio, 3) for name, ratio in ratios.items()},
        }
    return figures


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `--fit` varies of a board type: (domain, constant) pairs, a knee as (domain, "knee_hz" or "floor_v")."""

    board_type: str
    constants: tuple[tuple[str, str], ...]
    compare: Callable[[BoardType, Mapping[str, list[Row]]], Pairs]


def _all_tx2(board_type: BoardType, files: Mapping[str, list[Row]]) -> Pairs:
    return [
        *compare_tx2_gpu(files["tx2_gpu_rails.csv"], board_type),
        *compare_tx2_idle(board_type),
        *compare_tx2_cpu(files["tx2_cpu_over_idle.csv"], board_type),
    ]


FITS = (
    Fit(
        TX2,
        (
            *(("gpu", name) for name in ("capacitance_f", "leak_w", "knee_hz", "floor_v")),
            *((name, constant) for name in ("a57", "denver") for constant in ("capacitance_f", "leak_w", "floor_v")),
            *((name, constant) for name in ("memory", "soc", "module") for constant in ("constant_w", "traffic_w")),
        ),
        _all_tx2,
    ),
    Fit(
        ORIN,
        (
            *(("gpu", name) for name in ("capacitance_f", "leak_w", "idle_activity", "floor_v")),
            *(("a78-*", name) for name in ("capacitance_f", "leak_w", "idle_activity", "floor_v")),
            ("soc", "constant_w"),
            *((name, constant) for name in ("memory", "module") for constant in ("constant_w", "traffic_w")),
        ),
        lambda board_type, files: compare_orin(files["agx_orin_rails.csv"], board_type),
    ),
)


def fit(task: Fit, files: Mapping[str, list[Row]]) -> dict[str, dict[str, float]]:
    """The constants with the least squared relative errors, by domain; the start is what the board type has."""
    board_type = load_board_types()[task.board_type]
    start = [_read(board_type, domain, constant) for domain, constant in task.constants]

    def misses(logs: Any) -> list[float]:
        changed = _change(board_type, task.constants, np.exp(logs))
        return [float(np.log(simulated / measured)) for _, _, measured, simulated in task.compare(changed, files)]

    reach = np.log([_REACH.get(constant, 5.0) for _, constant in task.constants])
    bounds = np.log(start) - reach, np.log(start) + reach
    found = scipy.optimize.least_squares(misses, np.log(start), bounds=bounds, diff_step=1e-3)
    fitted: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for (domain, constant), value in zip(task.constants, np.exp(found.x), strict=True):
        fitted[domain][constant] = float(f"{value:.4g}")
    return fitted


def hold_out(task: Fit, files: Mapping[str, list[Row]], name: str) -> Pairs:
    """Each row of a file, simulated with constants that are fitted to all others."""
    pairs: Pairs = []
    for index, row in enumerate(files[name]):
        fitted = fit(task, {**files, name: [*files[name][:index], *files[name][index + 1 :]]})
        values = [fitted[domain][constant] for domain, constant in task.constants]
        pairs += compare_tx2_gpu([row], _change(load_board_types()[task.board_type], task.constants, values))
    return pairs


def draw(path: pathlib.Path, compared: Mapping[str, Pairs]) -> None:
    """Draw simulated over measured watts of every rail, with a tenth to both sides."""
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    for name, pairs in compared.items():
        if name != "tx2_frames.csv":
            for rail in dict.fromkeys(pair[1] for pair in pairs):
                points = [(measured, simulated) for _, each, measured, simulated in pairs if each == rail]
                label = f"{name.split('_')[0]} {rail.removesuffix('_w')}"
                axes.plot(*zip(*points, strict=True), "o" if name.startswith("tx2") else "^", label=label, markersize=5)
    ends = np.array([0.05, 60.0])
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color="0.9", label="within a tenth")
    axes.set(xscale="log", yscale="log", xlabel="measured (W)", ylabel="simulated (W)", title="Watts of virtual boards")
    axes.legend(fontsize=7, ncols=2, frameon=False)
    figure.savefig(path, dpi=130)


def _domains(simulation: Mapping[str, Any], pattern: str) -> list[dict[str, Any]]:
    return [each for each in simulation["domains"] if each["name"].startswith(pattern.removesuffix("*"))]


def _read(board_type: BoardType, domain: str, constant: str) -> float:
    described = _domains(board_type.simulation, domain)[0]
    knee = dict(zip(("knee_hz", "floor_v"), described.get("voltage_v", [[]])[0], strict=False))
    return float({**described, **knee}.get(constant, 0.0)) or 0.1


def _change(board_type: BoardType, constants: Sequence[tuple[str, str]], values: Iterable[float]) -> BoardType:
    """The board type with other constants; leakage grows by 1 % a degree (assumed)."""
    simulation = copy.deepcopy(dict(board_type.simulation))
    for (domain, constant), value in zip(constants, values, strict=True):
        for described in _domains(simulation, domain):
            if constant == "knee_hz":
                described["voltage_v"][0][0] = int(value)
            elif constant == "floor_v":
                described["voltage_v"][0][1] = float(value)
            else:
                described[constant] = float(value)
                if constant == "leak_w":
                    described["leak_w_per_c"] = 0.01 * float(value)
    return dataclasses.replace(board_type, simulation=simulation)


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--data", type=pathlib.Path, metavar="FOLDER", help="the measured tables")
    parser.add_argument("--fit", action="store_true", help="print the constants of board types that fit them")
    parser.add_argument("--chart", type=pathlib.Path, metavar="FILE", help="draw measured against simulated watts")
    options = parser.parse_args()
    paths = {name: options.data / name for name in COMPARISONS} if options.data else {}
    files = {name: list(csv.DictReader(path.open())) for name, path in paths.items() if path.is_file()}
    if (options.data and not files) or (options.fit and len(files) < len(COMPARISONS)):
        parser.error(f"--data lacks {', '.join(name for name in COMPARISONS if name not in files)}")
    compared = {name: COMPARISONS[name](rows) for name, rows in files.items()}
    figures: dict[str, Any] = {name: summarise(pairs) for name, pairs in compared.items()}
    figures["mlperf"] = summarise(compare_mlperf())
    if options.chart:
        draw(options.chart, compared)
    if options.fit:
        figures["fitted"] = {task.board_type: fit(task, files) for task in FITS}
        figures["held_out"] = summarise(hold_out(FITS[0], files, "tx2_gpu_rails.csv"))
    with _machine.only_json() as emit:
        emit("published_power", {"data": options.data and options.data.name}, figures)


if __name__ == "__main__":
    main()
