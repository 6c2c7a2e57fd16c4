"""Print board types and boards in full. The other commands are in `board.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from device_agent.protocol import EVERY_CLUSTER, format_cpus, format_mhz
from device_agent.protocol.hardware import PowerMode
from farm.cli import options, output, tables
from farm.crew import calibration as board_calibration
from farm.errors import UsageError
from farm.inventory import board_types as inventory_board_types
from farm.types import documents
from farm.values import Health

if TYPE_CHECKING:
    from farm.crew.calibration import Calibration

# Probes alone leave some hundred a day.
_EVENTS = 30


def print_types(types: Iterable[inventory_board_types.BoardType]) -> None:
    """Print one line per type."""
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


def print_type(board_type: inventory_board_types.BoardType) -> None:
    """Print everything in the inventory about one type."""
    _print_facts(board_type)
    if board_type.clusters:
        output.stdout.print()
        tables.print_table(
            ("Clock", "Of", "CPUs", "Lowest MHz", "Highest MHz", "Points"), _clock_rows(board_type), left=(0, 1, 2)
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


def _watts(board_type: inventory_board_types.BoardType) -> str:
    """How well each rail of a virtual board is known; fitted ones first."""
    rails = [rail["name"] for rail in board_type.simulation.get("rails", ())]
    said = {
        rail: inventory_board_types.describe_watts(board_type.name, [rail]).removeprefix("watts ") for rail in rails
    }
    fitted = [f"{rail} {text}" for rail, text in said.items() if text != "assumed"]
    return "; ".join([*fitted, *(["other rails assumed"] if len(fitted) < len(rails) else [])])


def _print_facts(board_type: inventory_board_types.BoardType) -> None:
    """Print one line per fact above the tables; unknown ones are left out."""
    power, thermal = board_type.power, board_type.thermal
    total = f"{' + '.join(power.total)} ({power.total_scope})" if power.total else "no rail, no sum of rails"
    if power.board_total:
        total += f"; with {' + '.join(power.board_total)}, where fitted, the whole board"
    target, gpu, size = board_type.target, board_type.gpu, board_type.memory_bytes
    hardware = [board_type.soc, _cores(board_type), f"{size / (1 << 30):g} GiB" if size else ""]
    hardware += [f"GPU {gpu.arch}"] if gpu else []
    facts = {
        "Type": f"{board_type.name}: {board_type.title}",
        "Hardware": ", ".join(filter(None, hardware)),
        "Releases": "L4T " + ", ".join(board_type.releases) if board_type.releases else "",
        "Compiled for": f"{target.mcpu}, {target.num_cores} threads, {board_type.link_triple}"
        if target
        else "the machine it is compiled on",
        "Recognised by": ", ".join((*board_type.detect.compatible, *board_type.detect.models)),
        "Total power": total if power.chips else "",
        "Memory floor": _floors(board_type),
        "Zones": ", ".join(f"{zone} (ignored)" if zone in thermal.ignore else zone for zone in thermal.zones),
        "Simulated power": _watts(board_type),
        "Virtual": f"device-agent serve --virtual {board_type.name}"
        if board_type.simulation
        else "no: the file has no simulation section",
    }
    tables.print_facts({fact: text for fact, text in facts.items() if text})


def _clock_rows(board_type: inventory_board_types.BoardType) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (
            *(cluster.name, cluster.core, format_cpus(cluster.cpus) + " (isolated)" * cluster.isolated),
            *_table(cluster.freqs_hz),
        )
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


def _cores(board_type: inventory_board_types.BoardType) -> str | None:
    """Format cores as `4× cortex-a57, 2× denver2`; clusters of one kind are counted together."""
    counts: dict[str, int] = {}
    for cluster in board_type.clusters:
        counts[cluster.core] = counts.get(cluster.core, 0) + len(cluster.cpus)
    return ", ".join(f"{count}× {core}" for core, count in counts.items()) or None


def _floors(board_type: inventory_board_types.BoardType) -> str:
    """Say which CPU clock raises the memory clock to what; equal clusters are said once."""
    texts: dict[str, list[str]] = {}
    for cluster in board_type.clusters:
        text = ", ".join(
            f"{format_mhz(memory)} MHz from {format_mhz(cpu)} MHz on" for cpu, memory in cluster.memory_floor_hz
        )
        texts.setdefault(text, []).append(cluster.name)
    return "; ".join(f"with {' or '.join(names)}, {text}" for text, names in texts.items() if text)


def _table(freqs_hz: Sequence[int]) -> tuple[object, object, object]:
    return (format_mhz(freqs_hz[0]), format_mhz(freqs_hz[-1]), len(freqs_hz)) if freqs_hz else (None, None, None)


def _highest_clocks(board_type: inventory_board_types.BoardType) -> str:
    tables = (
        [freq_hz for cluster in board_type.clusters for freq_hz in cluster.freqs_hz],
        board_type.gpu.freqs_hz if board_type.gpu else (),
        board_type.memory.freqs_hz if board_type.memory else (),
    )
    return " / ".join(format_mhz(max(table)) if table else "–" for table in tables)


@output.command
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|TYPE", help="A board, or a board type.")],
) -> output.Document:
    """Show a board or a board type. A board with its events, a type with clocks, sensors, power modes."""
    with options.open_store() as store:
        board = next((board for board in store.boards.fetch() if board.name == name), None)
        happened = store.events.fetch_of_boards(name) if board else []
        calibration = board_calibration.fetch_calibration(store, board) if board else None
    if board is None:
        yield from _show_type(name)
    else:
        yield board_calibration.to_document(board, calibration, happened)
        _print_board(board, calibration)
        output.stdout.print()
        _print_events(happened, _EVENTS)


def _show_type(name: str) -> output.Document:
    try:
        board_type = inventory_board_types.require_board_type(name)
    except UsageError as error:
        raise UsageError(f"there is neither a board nor a board type {name!r}", error.hint) from error
    yield board_type.model_dump(mode="json", by_alias=True)
    print_type(board_type)


def _print_events(events: list[documents.BoardEvent], newest: int) -> None:
    columns = ("kind", "before", "after", "reason", "by")
    tables.print_table(
        ("When", "What", "From", "To", "Why", "By"),
        [
            (output.moment(event.at), *(getattr(event, column) or "–" for column in columns))
            for event in events[max(0, len(events) - newest) :]
        ],
        left=(0, 1, 2, 3, 4, 5),
        spare=("By", "From"),
        empty="nothing has happened to it yet",
    )
    if len(events) > newest:
        output.stderr.print(f"the newest {newest} of {len(events)} events; --json has all")


def _print_board(board: documents.BoardInfo, calibration: Calibration | None) -> None:
    description = board.description
    watts = inventory_board_types.describe_watts(board.board_type)
    facts = {
        "Board": f"{board.board_type}/{board.name}{f' (simulated, {watts})' if board.simulated else ''}",
        "Reached": ", ".join(f"{key} {value}" for key, value in board.transport.items() if value not in (None, "")),
        "State": f"{board.state} since {output.moment(board.state_since)}: {board.state_reason}",
        "Health": f"{board.health} since {output.moment(board.health_since)}: {board.health_reason}",
        "Held by": output.holder(board.lease),
        "Labels": ", ".join(f"{key}={value}" for key, value in board.labels.items()) or "–",
        "CPU": description.get("cpu_model", "–"),
        "Agent": description.get("agent_version", "–"),
        "Last seen": output.moment(board.seen_at),
        "Golden": "–" if calibration is None else calibration.text,
    }
    if board.health == Health.UNSAFE:
        facts["Do"] = "look at it; on the board: device-agent clocks restore; then: farm board release"
    tables.print_facts(facts)
