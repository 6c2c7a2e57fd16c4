"""Print the results of the one-shot commands `describe`, `clocks`, `power` and `doctor` as a table or JSON.

Exit codes are those of `agent.py`. The checks of `doctor` are in `doctor.py`.
"""

from __future__ import annotations

import argparse
import json
import select
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence

from device_agent import doctor, options
from device_agent.errors import BusyError, HelperUnavailableError
from device_agent.power.meter import compare_meter
from device_agent.protocol import Clocks, DomainClocks, PinReport, PinStatus, PowerSpec, PowerTrace
from device_agent.protocol.texts import format_mhz
from device_agent.session.board import Board

_EXIT_CODES = {
    PinStatus.OK: 0,
    PinStatus.FAILED: 1,
    PinStatus.BUSY: 1,
    PinStatus.REFUSED: 2,
    PinStatus.UNAVAILABLE: 3,
    PinStatus.UNSAFE: 4,
}


def run(chosen: argparse.Namespace, board: Board) -> int:
    """Run the command that `chosen` names; return its exit code. Raises AgentError, ProtocolError."""
    if chosen.command == "describe":
        return _describe(chosen, board)
    if chosen.command == "power":
        return _power(chosen, board)
    if chosen.command == "doctor":
        return doctor.run(board, chosen.json, chosen.pin)
    if chosen.verb == "show":
        return _show(chosen, board)
    return _pin(chosen, board) if chosen.verb == "pin" else _restore(chosen, board)


def _describe(chosen: argparse.Namespace, board: Board) -> int:
    board.measure_sensors()
    description = board.describe()
    if chosen.json:
        print(json.dumps(description.to_dict()))
        return 0
    shown = description.to_dict() | {
        "clocks": f"see `device-agent clocks show`; {len(description.clocks.clusters)} CPU clusters",
        "sensors": [_sensor_text(sensor) for sensor in description.to_dict()["sensors"]],
    }
    for field, value in shown.items():
        lines = value if field in ("notes", "sensors") else [_text(value)]
        for index, line in enumerate(lines or ["-"]):
            print(f"{field if index == 0 else '':20} {line}")
    return 0


def _sensor_text(sensor: Mapping[str, object]) -> str:
    period, step = sensor["update_period_s"], sensor["step_w"]
    facts = [
        f"new value every {period * 1000:.4g} ms" if isinstance(period, float) else "period not seen",
        f"step {step * 1000:.3g} mW" if isinstance(step, float) else "step not seen",
    ]
    return f"{sensor['rail']}: {sensor['driver']}, {', '.join(facts)}{'; ' if sensor['note'] else ''}{sensor['note']}"


def _text(value: object) -> str:
    if value in ((), [], {}, "", None):
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    return str(value)


def _show(chosen: argparse.Namespace, board: Board) -> int:
    clocks = board.read_clocks()
    if chosen.json:
        print(json.dumps(clocks.to_dict() | {"board": board.name, "simulated": board.tree.simulated}))
    else:
        print(f"{board.key}{'  (simulated)' if board.tree.simulated else ''}")
        print(format_clocks(clocks))
    return 4 if clocks.unsafe else 0


def format_clocks(clocks: Clocks) -> str:
    """Format every clock in MHz, with the notes on them, as a table."""
    domains: list[DomainClocks] = [*clocks.clusters, *filter(None, (clocks.gpu, clocks.memory))]
    rows = [("CLOCK", "NOW MHz", "MIN", "MAX", "GOVERNOR", "CPUS ONLINE", "AVAILABLE MHz")]
    for domain in domains:
        cpus = f"{_cpu_list(domain.online)} of {_cpu_list(domain.cpus)}" if domain.cpus else "-"
        rows.append(
            (
                domain.name + (" (isolated)" if domain.isolated else ""),
                format_mhz(domain.current_hz, "-"),
                format_mhz(domain.min_hz, "-"),
                format_mhz(domain.max_hz, "-"),
                domain.governor or "-",
                cpus,
                _range(domain.available_hz),
            )
        )
    lines = list(_columns(rows))
    if clocks.power_modes:
        lines.append(f"power mode   {clocks.power_mode or 'unknown'} of {', '.join(clocks.power_modes)}")
    lines.append(f"held by      {clocks.holder or '-'}")
    if clocks.unsafe:
        lines.append(f"UNSAFE       {clocks.unsafe}")
    lines += [f"note         {note}" for note in clocks.notes]
    return "\n".join(lines)


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _range(available_hz: tuple[int, ...]) -> str:
    if not available_hz:
        return "-"
    return f"{format_mhz(min(available_hz))} to {format_mhz(max(available_hz))}, {len(available_hz)} points"


def _cpu_list(cpus: tuple[int, ...]) -> str:
    return ",".join(map(str, cpus)) or "none"


def _pin(chosen: argparse.Namespace, board: Board) -> int:
    """Hold a point in the foreground. However this process ends, the helper restores the clocks."""
    point = options.read_point(chosen)
    with _Signals() as signals:
        report = board.pin(point)
        _print_report(chosen, board, report)
        if report.status is not PinStatus.OK:
            return _EXIT_CODES[report.status]
        if not chosen.json:
            held = f"for {chosen.seconds:g} s" if chosen.seconds else "until Ctrl-C"
            print(f"held {held}", flush=True)
        signals.wait(chosen.seconds)
        report = board.unpin()
    if report.status is not PinStatus.OK or not chosen.json:
        print(f"restored: {report.message or report.status}", flush=True)
    return _EXIT_CODES[report.status]


class _Signals:
    """Turn SIGINT, SIGTERM and SIGHUP into a wake-up, so that the interrupted work is cleaned up."""

    def __enter__(self) -> _Signals:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno())
        self._old = {
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._read.close()
        self._write.close()

    def wait(self, seconds: float | None) -> None:
        """Wait for a signal, or `seconds`."""
        select.select([self._read], [], [], seconds)


def _print_report(chosen: argparse.Namespace, board: Board, report: PinReport) -> None:
    if chosen.json:
        print(json.dumps(report.to_dict() | {"board": board.name, "simulated": board.tree.simulated}), flush=True)
        return
    simulated = "  (simulated)" if board.tree.simulated else ""
    print(f"{report.status}{simulated}: {report.message or f'reached in {report.took_s * 1000:.0f} ms'}")
    for note in report.notes:
        print(f"note         {note}")
    if report.clocks is not None:
        print(format_clocks(report.clocks), flush=True)


def _restore(chosen: argparse.Namespace, board: Board) -> int:
    access = board.access
    if access is None:
        raise HelperUnavailableError("no clock helper answers; start it, or run this as root")
    holder = access.status().holder
    if holder and not chosen.force:
        raise BusyError(f"{holder} holds the clocks and will restore them when it ends; --force takes them away")
    notes = access.clear_unsafe(force=chosen.force)
    clocks = board.read_clocks()
    if chosen.json:
        print(json.dumps(clocks.to_dict() | {"board": board.name, "restored": list(notes)}))
    else:
        print("restored" if notes else "nothing was left to restore")
        for note in notes:
            print(f"note         {note}")
        print(format_clocks(clocks))
    return 4 if clocks.unsafe else 0


def _power(chosen: argparse.Namespace, board: Board) -> int:
    board.measure_sensors()
    trace = board.watch_power(PowerSpec(chosen.seconds, chosen.rate_hz))
    if chosen.json:
        print(json.dumps(trace.to_dict()))
    else:
        print(format_power(trace))
    # Sensors that all fail are an error; a board without sensors is not.
    return 1 if board.sensor_infos and not (trace.window and trace.window.rails) else 0


def format_power(trace: PowerTrace) -> str:
    """Format every rail with its interval as a table, the total last."""
    title = f"{trace.board}{'  (simulated)' if trace.simulated else ''}"
    if trace.window is None:
        return f"{title}\nno power sensor that can be read: power and energy are unknown, not zero"
    window = trace.window
    named = [(rail.rail, rail) for rail in window.rails]
    if window.total is not None:
        named.append((f"total ({window.total_scope})", window.total))
    rows = [("RAIL", "POWER W", "95 % INTERVAL", "ENERGY J", "READS", "NEW VALUES", "MISSED", "BAD")]
    rows += [
        (
            name,
            f"{rail.power_w:.3f}",
            f"{rail.power_ci_w[0]:.3f} to {rail.power_ci_w[1]:.3f}",
            f"{rail.energy_j:.3f}",
            str(rail.reads),
            str(rail.updates),
            str(rail.gaps),
            str(rail.bad_reads),
        )
        for name, rail in named
    ]
    lines = [f"{title}, {window.window_s:.2f} s", *_columns(rows)]
    if (ratio := compare_meter(window)) is not None:
        lines.append(f"meter        {ratio[0]:.3f} times the total (95 % interval {ratio[1]:.3f} to {ratio[2]:.3f})")
    if window.total is None:
        lines.append("note         this board has no total")
    lines += [f"note         {note}" for note in filter(None, window.note.split("; "))]
    return "\n".join(lines)
