"""What holding clocks costs: pin and verify, restore, the agent's memory; over the whole way from client to board.

A real agent and a real clock helper on a virtual board. Default budget: well below a minute.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import _machine
import psutil
from agent_overhead import build_library, running, summary

from device_agent import protocol
from device_agent.protocol import OperatingPoint

# Two points that differ in every clock; the goals are the project's own.
BOARD_TYPES = ("jetson-nano", "jetson-tx2", "jetson-orin-nano-8gb")
GOAL_PIN_MS, GOAL_RESIDENT_MB = 150, 150


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="pins of each board (default: 40)")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 4
    with _machine.only_json() as emit, _machine.scratch() as folder:
        quiet = _machine.wait_until_quiet(options.quick)
        library = build_library(folder)
        boards = {name: measure(name, options.rounds, library, folder) for name in BOARD_TYPES}
        goals = {"pin_ms": GOAL_PIN_MS, "agent_resident_mb": GOAL_RESIDENT_MB}
        emit("clocks", vars(options), {"machine_quiet": quiet, "goals": goals, "boards": boards})


def measure(board_type: str, rounds: int, library: bytes, folder: pathlib.Path) -> dict[str, Any]:
    """Pin a virtual board of this type again and again, by turns at its lowest and highest clocks."""
    ready = folder / f"{board_type}.json"
    serve = ["serve", "--virtual", board_type, "--name", "bench", "--ready-file", str(ready), "--port", "9600"]
    command = [sys.executable, "-m", "device_agent", *serve, "--port-end", "9699", "--log-level", "warning"]
    with running(command, ready, stderr=subprocess.DEVNULL):
        facts = json.loads(ready.read_text())
        from tvm import rpc

        session = rpc.connect("127.0.0.1", facts["port"], key=facts["key"])
        description = protocol.Description.from_json(session.get_function(protocol.DESCRIBE)())
        pin, unpin = session.get_function(protocol.PIN), session.get_function(protocol.UNPIN)
        points = make_points(description.clocks)
        first_s, again_s, unpin_s = [], [], []
        for _ in range(rounds):
            first_s.append(call(pin, points[0]))
            again_s.append(call(pin, points[1]))
            unpin_s.append(call(unpin, None))
        spec = protocol.MeasureSpec((protocol.TensorSpec((64, 64), "float32"),) * 3)
        outcome = protocol.Outcome.from_json(session.get_function(protocol.MEASURE)(spec.to_json(), library))
        if outcome.status is not protocol.Status.OK:
            raise SystemExit(f"the candidate failed: {outcome.status}: {outcome.message}")
        agent = psutil.Process(facts["pid"])
        resident = {process.pid: process.memory_info().rss for process in (agent, *agent.children())}
        return {
            "pin_ms": summary(first_s),  # with the snapshot on disk
            "pin_again_ms": summary(again_s),  # held already
            "unpin_ms": summary(unpin_s),
            "domains": len(description.clocks.clusters)
            + sum(map(bool, (description.clocks.gpu, description.clocks.memory))),
            "agent_resident_mb": round(resident.pop(agent.pid) / 1e6, 1),
            "beside_it_resident_mb": [round(size / 1e6, 1) for size in sorted(resident.values())],
        }


def make_points(clocks: protocol.Clocks) -> tuple[OperatingPoint, OperatingPoint]:
    """Every clock at its lowest, and at its highest."""

    def point(pick: Any) -> OperatingPoint:
        return OperatingPoint(
            cpu_freq_hz={domain.name: pick(domain.available_hz) for domain in clocks.clusters if domain.online},
            gpu_freq_hz=pick(clocks.gpu.available_hz) if clocks.gpu else None,
            memory_freq_hz=max(clocks.memory.available_hz) if clocks.memory else None,
        )

    return point(min), point(max)


def call(function: Any, point: OperatingPoint | None) -> float:
    """Seconds that the client waits. Ends the benchmark when the point is not reached."""
    arguments = [] if point is None else [point.to_json()]
    started = time.perf_counter()
    answer = function(*arguments)
    took_s = time.perf_counter() - started
    report = protocol.PinReport.from_json(answer)
    if report.status is not protocol.PinStatus.OK:
        raise SystemExit(f"{report.status}: {report.message}")
    return took_s


if __name__ == "__main__":
    main()
