"""What is printed about board types: kinds of boards, as the inventory has them. The commands are in `board.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from device_agent.protocol import EVERY_CLUSTER, format_cpus, format_mhz
from device_agent.protocol.hardware import Cluster, PowerMode
from farm.cli import output, tables
from farm.inventory.board_types import BoardType


def print_types(types: Iterable[BoardType]) -> None:
    """One line per type."""
    tables.print_table(
        ("Type", "CPU", "CPU / GPU / memory MHz", "Virtual"),
        [
            (
                board_type.name,
                (_cores(board_type) or "–").replace("cortex-", ""),
                _highest_clocks(board_type),
                "yes" if board_type.simulation else "no",
            )
            for board_type in types
        ],
        left=(0, 1, 3),
    )


def print_type(board_type: BoardType) -> None:
    """Everything that the inventory says of one type."""
    _print_facts(board_type)
    if board_type.clusters:
        output.stdout.print()
        tables.print_table(
            ("Clock", "Of", "CPUs", "Lowest MHz", "Highest MHz", "Points"),
            _clock_rows(board_type),
            left=(0, 1, 2),
        )
    if board_type.power.chips:
        output.stdout.print()
        tables.print_table(
            ("Sensor", "Rails", "Fitted"),
            [
                (
                    f"INA3221 {chip.address}",
                    ", ".join(rail or "(none)" for rail in chip.rails),
                    "always" if chip.fitted else "on some carriers",
                )
                for chip in board_type.power.chips
            ],
            left=(0, 1, 2),
        )
    if board_type.power_modes:
        output.stdout.print()
        tables.print_table(
            ("Mode", "Name", "CPUs online", "CPU MHz at most", "GPU MHz", "Memory MHz", "Note"),
            [_mode_row(mode, board_type.default_power_mode) for mode in board_type.power_modes],
            left=(1, 2, 3, 6),
        )


def _print_facts(board_type: BoardType) -> None:
    """One line per fact above the tables; unknown ones are left out."""
    power, thermal = board_type.power, board_type.thermal
    total = f"{' + '.join(power.total)} ({power.total_scope})" if power.total else "no rail, no sum of rails"
    if power.board_total:
        total += f"; with {' + '.join(power.board_total)}, where fitted, the whole board"
    target = board_type.target
    facts = {
        "Type": f"{board_type.name}: {board_type.title}",
        "Hardware": ", ".join(
            filter(None, (board_type.soc, _cores(board_type), _gibibytes(board_type.memory_bytes), _gpu(board_type)))
        ),
        "Releases": "L4T " + ", ".join(board_type.releases) if board_type.releases else "",
        "Compiled for": f"{target.mcpu}, {target.num_cores} threads, {board_type.link_triple}"
        if target
        else "the machine it is compiled on",
        "Recognised by": ", ".join((*board_type.detect.compatible, *board_type.detect.models)),
        "Total power": total if power.chips else "",
        "Memory floor": _floors(board_type),
        "Zones": ", ".join(f"{zone} (ignored)" if zone in thermal.ignore else zone for zone in thermal.zones),
        "Virtual": f"device-agent serve --virtual {board_type.name}"
        if board_type.simulation
        else "no: the file has no simulation section",
    }
    tables.print_facts({fact: text for fact, text in facts.items() if text})


def _clock_rows(board_type: BoardType) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (cluster.name, cluster.core, _cluster_cpus(cluster), *_table(cluster.freqs_hz))
        for cluster in board_type.clusters
    ]
    if board_type.gpu:
        rows.append(("gpu", board_type.gpu.arch, None, *_table(board_type.gpu.freqs_hz)))
    if board_type.memory:
        rows.append(("memory", None, None, *_table(board_type.memory.freqs_hz)))
    return rows


def _mode_row(mode: PowerMode, default: int | None) -> tuple[object, ...]:
    limits = [
        mhz if cluster == EVERY_CLUSTER else f"{cluster} {mhz}"
        for cluster, mhz in ((cluster, format_mhz(freq_hz)) for cluster, freq_hz in mode.cpu_max_hz.items())
    ]
    notes = ("default" if mode.id == default else "", "needs a reboot" if mode.power_gating else "", mode.note)
    return (
        mode.id,
        mode.name,
        format_cpus(mode.cores_online) if mode.cores_online else "as they are",
        ", ".join(limits) or "no limit",
        format_mhz(mode.gpu_max_hz) if mode.gpu_max_hz else "no limit",
        format_mhz(mode.memory_max_hz) if mode.memory_max_hz else "no limit",
        "; ".join(filter(None, notes)),
    )


def _cores(board_type: BoardType) -> str | None:
    """Such as `4× cortex-a57, 2× denver2`; clusters of one kind are counted together."""
    counts: dict[str, int] = {}
    for cluster in board_type.clusters:
        counts[cluster.core] = counts.get(cluster.core, 0) + len(cluster.cpus)
    return ", ".join(f"{count}× {core}" for core, count in counts.items()) or None


def _gpu(board_type: BoardType) -> str:
    return f"GPU {board_type.gpu.arch}" if board_type.gpu else ""


def _gibibytes(size: int | None) -> str:
    return f"{size / (1 << 30):g} GiB" if size else ""


def _cluster_cpus(cluster: Cluster) -> str:
    return format_cpus(cluster.cpus) + (" (isolated)" if cluster.isolated else "")


def _floors(board_type: BoardType) -> str:
    """From which CPU clock on the memory clock is raised to what; clusters that agree are said once."""
    texts: dict[str, list[str]] = {}
    for cluster in board_type.clusters:
        text = ", ".join(
            f"{format_mhz(memory)} MHz from {format_mhz(cpu)} MHz on" for cpu, memory in cluster.memory_floor_hz
        )
        texts.setdefault(text, []).append(cluster.name)
    return "; ".join(f"with {' or '.join(names)}, {text}" for text, names in texts.items() if text)


def _table(freqs_hz: Sequence[int]) -> tuple[object, object, object]:
    return (format_mhz(freqs_hz[0]), format_mhz(freqs_hz[-1]), len(freqs_hz)) if freqs_hz else (None, None, None)


def _highest_clocks(board_type: BoardType) -> str:
    tables = (
        [freq_hz for cluster in board_type.clusters for freq_hz in cluster.freqs_hz],
        board_type.gpu.freqs_hz if board_type.gpu else (),
        board_type.memory.freqs_hz if board_type.memory else (),
    )
    return " / ".join(format_mhz(max(table)) if table else "–" for table in tables)
