"""What probes cost: 32 virtual boards registered, started and probed from nothing; then probes of boards that are up.

Prints one JSON document. The boards run on this machine too, so that starting them is most of the first figure.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _machine
import psutil

from farm import settings as farm_settings
from farm.connectivity.services import Services, start_services
from farm.store import Store
from farm.values import Health, Virtual

BOARDS, ROUNDS = 32, 3
_TIMEOUT_S = 300.0
_IDLE_S = 30.0
_LOOK_S = 0.2


def main() -> None:
    """Run the benchmark."""
    options = _machine.parser(__doc__).parse_args()
    count, rounds, idle_s = (2, 1, 2.0) if options.quick else (BOARDS, ROUNDS, _IDLE_S)
    with _machine.only_json() as emit, tempfile.TemporaryDirectory(prefix="farm-bench-home-") as home:
        os.environ |= {"FARM_HOME": home, "FARM_METRICS_PORT": "0"}
        settings = farm_settings.load()
        with Store(Path(home) / "farm.db") as store:
            began = time.monotonic()
            for number in range(count):
                store.boards.register(f"nano-{number:02}", "jetson-nano", Virtual(number))
            services, _ = start_services(settings)
            try:
                figures = measure(store, services, count, rounds, idle_s, began)
            finally:
                services.stop()
        emit("probes", {"boards": count, "rounds": rounds, "idle_s": idle_s}, figures)


def measure(store: Store, services: Services, count: int, rounds: int, idle_s: float, began: float) -> dict[str, Any]:
    """Everything that is timed; `began` is when the first board was registered."""
    deadline = began + _TIMEOUT_S
    while sum(row.health == Health.GOOD for row in store.boards.fetch()) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all boards are good after {_TIMEOUT_S:g} s")
        time.sleep(_LOOK_S)
    first_s = time.monotonic() - began
    first_cpu_s = cpu_s(services.info["pid"])
    _machine.say(f"{count} boards registered, started and probed in {first_s:.1f} s")
    before, started = cpu_s(services.info["pid"], deep=False), time.monotonic()
    time.sleep(idle_s)
    idle_share = (cpu_s(services.info["pid"], deep=False) - before) / (time.monotonic() - started)
    walls, cpus, takes, passed = [], [], [], 0
    names = [row.name for row in store.boards.fetch()]
    for _ in range(rounds):
        before, started = cpu_s(services.info["pid"]), time.monotonic()
        reports = services.probe(names, _TIMEOUT_S)
        walls.append(time.monotonic() - started)
        cpus.append((cpu_s(services.info["pid"]) - before) / count)
        takes += [report["seconds"] for report in reports]
        passed += sum(report["passed"] for report in reports)
    return {
        "registered_and_probed_s": round(first_s, 1),
        "cpu_s_until_then": round(first_cpu_s, 1),
        "idle_share_of_a_core": _machine.round_to(idle_share, 3),
        "probe_s": _machine.spread(takes),
        "cpu_s_per_probe": _machine.round_to(statistics.median(cpus), 3),
        "round_s": _machine.spread(walls),
        "passed": passed,
        "probes": count * rounds,
    }


def cpu_s(pid: int, deep: bool = True) -> float:
    """CPU seconds of a process and of what it started, ended children included; not `deep`: without virtual boards."""
    total = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            if not deep and process != root and "device_agent" in " ".join(process.cmdline()):
                continue
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
        if deep:  # a board's sessions and workers have ended already
            total += times.children_user + times.children_system
    return total


if __name__ == "__main__":
    main()
