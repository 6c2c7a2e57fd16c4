"""`device-agent doctor`: check each requirement of a board, and advise on what is missing."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator

from device_agent.errors import AgentError
from device_agent.platforms.evidence import find_engine_versions
from device_agent.protocol import Engine, OperatingPoint, PinStatus
from device_agent.session.board import Board

# Required by the TVM wheels.
_OLDEST_GLIBC = (2, 27)
# A candidate's library and a model with its inputs.
_NEEDED_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Check:
    """One line: `level` is ok, warning or failed; `advice` is what to do."""

    name: str
    level: str
    message: str
    advice: str = ""


def run(board: Board, as_json: bool, pin: bool) -> int:
    """Check everything and print it; return 0, 1 for a failed check, 4 for an unsafe board."""
    checks = [check for part in (_system, _type, _clocks, _thermal, _power) for check in part(board)]
    if pin:
        checks += _pin(board)
    if as_json:
        document = {"board": board.name, "board_type": board.board_type, "simulated": board.tree.simulated}
        print(json.dumps(document | {"checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        print(f"{board.key}{'  (simulated)' if board.tree.simulated else ''}")
        for check in checks:
            print(f"{check.level:8} {check.name:14} {check.message}")
            if check.advice:
                print(f"{'':23} -> {check.advice}")
    if any(check.name == "unsafe" and check.level == "failed" for check in checks):
        return 4
    return 1 if any(check.level == "failed" for check in checks) else 0


def _check(name: str, good: object, message: str, advice: str = "", bad: str = "failed") -> Check:
    return Check(name, "ok" if good else bad, message, "" if good else advice)


def _system(board: Board) -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield _check("python", sys.version_info >= (3, 10), version, "the agent needs Python 3.10 or newer")
    library, text = platform.libc_ver()
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    good = library == "glibc" and numbers >= _OLDEST_GLIBC
    yield _check("c library", good, f"{library or 'unknown'} {text}", "the TVM wheels need glibc 2.27 or newer")
    tvm = find_engine_versions().get(Engine.RELAX_VM.value)
    yield _check("tvm", tvm, tvm or "not installed", "install apache-tvm: nothing can be measured without it")
    about = board.describe()
    rivals = [each for each in about.engines if each not in (Engine.RELAX_VM, Engine.KERNEL)]
    for engine in rivals:
        yield Check(engine, "ok", about.engine_versions[engine])
    if not rivals:
        yield Check("engines", "ok", "only TVM; models are compared with others where a board has them")
    free = shutil.disk_usage(tempfile.gettempdir()).free
    yield _check(
        "disk",
        free >= _NEEDED_BYTES,
        f"{free / 2**30:.1f} GiB free in {tempfile.gettempdir()}",
        "free 1 GiB",
        "warning",
    )


def _type(board: Board) -> Iterator[Check]:
    if board.detected_type:
        same = board.detected_type == board.board_type
        advice = f"start the agent with --board-type {board.detected_type}"
        yield _check("board type", same, f"{board.board_type}; device tree: {board.detected_type}", advice, "warning")
    else:
        yield Check("board type", "ok", f"{board.board_type}; the device tree names no type of the inventory")
    for note in board.platform.notes:
        yield Check("board", "warning", note)


def _clocks(board: Board) -> Iterator[Check]:
    if board.access is not None:
        try:
            status = board.access.status()
        except AgentError as error:
            if isinstance(error.__cause__, PermissionError):  # this user is outside the group; the agent is not
                yield Check("clock helper", "warning", str(error), "as root, or in that group, more is checked")
            else:
                yield Check("clock helper", "failed", str(error), "systemctl status tvm-farm-clock-helper")
        else:
            yield Check(
                "clock helper", "ok", f"answers; clocks {f'held by {status.holder}' if status.holder else 'free'}"
            )
            advice = "look at the board, then `device-agent clocks restore`"
            yield _check("unsafe", not status.unsafe, status.unsafe or "no: clocks can be restored", advice)
    else:
        advice = "start tvm-farm-clock-helper (deploy/systemd); as root, `clocks pin` starts one of its own"
        yield Check("clock helper", "warning", "none: operating points cannot be held", advice)
    clocks = board.read_clocks()
    tables = [domain for domain in clocks.clusters if domain.available_hz]
    yield _check(
        "cpu clocks",
        tables,
        ", ".join(f"{domain.name}: {len(domain.available_hz)} points" for domain in tables) or "no frequency table",
        "this kernel offers no cpufreq: clocks can neither be held nor checked",
        "warning",
    )
    for note in clocks.notes:
        if note not in board.platform.notes:
            yield Check("clocks", "warning", note)


def _thermal(board: Board) -> Iterator[Check]:
    evidence = board.evidence.read()
    zones = evidence.temperature_c
    hottest = max(zones, key=lambda zone: zones[zone], default=None)
    message = f"{len(zones)} zones, hottest {hottest} at {zones[hottest]:g} C" if hottest else "no zone can be read"
    yield _check("temperature", hottest, message, "throttling by heat cannot be seen on this board", "warning")
    active = [name for name, state in evidence.cooling.items() if state > 0]
    advice = "let it cool; results taken now are marked throttled"
    yield _check("throttling", not active, ", ".join(active) or "none", advice, "warning")


def _power(board: Board) -> Iterator[Check]:
    board.measure_sensors()
    if not board.sensor_infos:
        yield Check("power", "warning", "no sensor that can be read: power and energy will be unknown, not zero")
        return
    for info in board.sensor_infos:
        period = f"new value every {info.update_period_s * 1000:.4g} ms" if info.update_period_s else "period not seen"
        step = f"steps of {info.step_w * 1000:.3g} mW" if info.step_w else "step not seen"
        level = "warning" if info.note else "ok"
        yield Check("power", level, f"{info.rail}: {period}, {step}{'; ' if info.note else ''}{info.note}")
    total = board.power.total_rails
    message = f"{' + '.join(total)} ({board.power.total_scope})" if total else board.power.note
    yield _check("total power", total, message, "energy per inference will be unknown", "warning")


def _pin(board: Board) -> Iterator[Check]:
    """Hold every cluster at its highest clock, then put it back."""
    clusters = board.read_clocks().clusters
    highest = {domain.name: max(domain.available_hz) for domain in clusters if domain.available_hz and domain.online}
    if not highest:
        yield Check("pin", "warning", "no clock to hold")
        return
    report = board.pin(OperatingPoint(cpu_freq_hz=dict(highest)))
    yield _check("pin", report.status is PinStatus.OK, report.message or f"reached in {report.took_s * 1000:.0f} ms")
    restored = board.unpin()
    yield _check("restore", restored.status is PinStatus.OK, restored.message or "every clock is as it was")
