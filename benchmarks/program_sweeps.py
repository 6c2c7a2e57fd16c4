"""Any program: how right a sweep of a virtual Nano's CPU clocks is with few visits, and what the agent adds to a run.

The program computes for a fixed number of cycles, so its time is a constant over the clock: that constant, from a sweep
of every point, is the truth. What the agent adds is measured on this machine. Default budget: two minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import _machine
import agent_overhead
import numpy as np

from device_agent.protocol import Command, Engine, RunSpec, Status
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession

FARM = pathlib.Path(sys.executable).with_name("farm")
# It takes 100 ms here; `own` is what it says itself.
SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
int main(int count, char **words) {
    double began = now();
    volatile unsigned long sum = 0;
    for (unsigned long i = 0; i < atol(words[1]); i++) sum += i;
    printf("own = %.9f\\n", now() - began);
    return 0;
}
"""
TRIED_LOOPS, WANTED_S = 10_000_000, 0.1


def main() -> None:
    options = _machine.parser(__doc__).parse_args()
    with _machine.only_json() as emit, _machine.scratch() as folder:
        _machine.wait_until_quiet(options.quick)
        program = folder / "program"
        command = ["gcc", "-O1", "-o", str(program), "-x", "c", "-"]
        subprocess.run(command, input=SOURCE.encode(), check=True, timeout=60)
        tried = subprocess.run([program, str(TRIED_LOOPS)], capture_output=True, check=True).stdout
        took_s = float(tried.split()[-1])
        words = ("./program", str(round(TRIED_LOOPS * WANTED_S / took_s)))
        figures = measure_overhead(words, program.read_bytes(), folder, 10 if options.quick else 50)
        emit("program_sweeps", {}, figures | sweep(words, program, folder))


def sweep(words: tuple[str, ...], program: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Sweep the virtual board twice, by the installed command."""
    environment = os.environ | {"FARM_HOME": str(folder / "home")}

    def run(*command: str) -> bytes:
        return subprocess.run([FARM, *command], env=environment, stdout=subprocess.PIPE, timeout=600, check=True).stdout

    run("board", "add", "nano", "--virtual", "jetson-nano")
    what = ("sweep", "run", "--json", "--program", " ".join(words), "--file", str(program), "--board", "nano")
    try:
        rows, all_rows = (json.loads(run(*what, *more))["series"][0]["rows"] for more in ((), ("--exhaustive",)))
    finally:
        subprocess.run([FARM, "down", "--force"], env=environment, stdout=subprocess.DEVNULL, timeout=120, check=False)
    cycles = statistics.median(row["latency_s"]["value"] * find_hz(row) for row in all_rows)
    errors = [abs((row["latency_s"] or row["predicted"])["value"] * find_hz(row) / cycles - 1) for row in rows]
    visits = sum(row["visits"] for row in rows)
    return {"visits": visits, "worst_error": max(errors), "median_error": statistics.median(errors)}


def find_hz(row: dict[str, Any]) -> float:
    return float(row["point"]["cpu_freq_hz"]["a57"])


def measure_overhead(words: tuple[str, ...], content: bytes, folder: pathlib.Path, runs: int) -> dict[str, Any]:
    """What an agent adds to each run, and how long its window is, beside the program's own time."""
    ready = folder / "ready.json"
    serve = ["serve", "--name", "bench", "--ready-file", str(ready), "--log-level", "warning"]
    with agent_overhead.running([sys.executable, "-m", "device_agent", *serve], ready):
        about = json.loads(ready.read_text())
        command = Command(words, {"program": hashlib.sha256(content).hexdigest()})
        with BlockingSession(AgentAddress("127.0.0.1", about["port"]), about["key"]) as board:
            spec = RunSpec(Engine.PROGRAM, runs=runs, command=command)
            outcome, outputs = board.run_model(spec, b"", {"program": np.frombuffer(content, np.uint8)})
    if outcome.status is not Status.OK or outcome.details is None:
        raise SystemExit(f"the program failed: {outcome}")
    own_s = [float(array.tobytes().split()[-1]) for array in list(outputs.values())[::2]]
    [(start_s, end_s)] = outcome.details.windows
    return {
        "own_ms": agent_overhead.summary(own_s),
        "added_to_a_run_ms": 1e3 * (outcome.timing_s - sum(own_s)) / runs,
        "timed_over_own": sum(outcome.latency_s) / sum(own_s),
        "window_over_own": (end_s - start_s) / sum(own_s),
    }


if __name__ == "__main__":
    main()
