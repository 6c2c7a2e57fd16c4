"""What the services grow by while a rack of virtual boards is kept, probed and asked about: it should be nothing.

Prints one JSON document: memory, descriptors, threads and files early and late, and whether they are flat. 100 boards
for 20 minutes by default, for which the machine needs some 16 GB; `--boards` and `--minutes` make it smaller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import _machine
import psutil

BOARDS, MINUTES = 100, 20.0
TYPE = "jetson-nano"
# Probes are what idle boards are used for; this often, a soak of minutes has as many as a day of the default.
PROBE_EVERY_S = 30.0
_SAMPLES = 60
# Boards start a few at a time, each in seconds; a busy machine takes longer.
_START_S_PER_BOARD = 15.0
# What is taken for flat, late against early: allocators and caches settle within this.
_MOST_GROWTH = 0.05
_SLACK = {"memory_bytes": 8 << 20, "descriptors": 4, "threads": 4, "files": 4}


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the services and their children hold at one moment; `at_s` is since the boards were up."""

    at_s: float
    memory_bytes: dict[str, int]
    descriptors: dict[str, int]
    threads: dict[str, int]
    files: dict[str, int]
    file_bytes: int


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", type=int, default=BOARDS, help=f"virtual boards (default: {BOARDS})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"once all are up (default: {MINUTES:g})")
    options = parser.parse_args()
    if options.quick:
        options.boards, options.minutes = 3, 1.0
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("soak", {**vars(options), "probe_every_s": PROBE_EVERY_S}, soak(options.boards, options.minutes, folder))


def soak(boards: int, minutes: float, folder: pathlib.Path) -> dict[str, Any]:
    from farm.connectivity.services import find_services
    from farm.settings import Settings

    home, temporary = folder / "home", folder / "t"
    temporary.mkdir()
    register(home, boards)
    settings = Settings(home=str(home))
    samples: list[Sample] = []
    with keep_services(home, temporary) as process:
        began = time.monotonic()
        wait_up(settings, boards)
        _machine.say(f"{boards} boards are up after {time.monotonic() - began:.0f} s")
        began = time.monotonic()
        while (at_s := time.monotonic() - began) < minutes * 60:
            services = find_services(settings)
            if services is None or process.poll() is not None:
                raise SystemExit("the services ended")
            services.fetch_status()  # as a user would
            samples.append(take_sample(at_s, process.pid, (home, temporary)))
            time.sleep(minutes * 60 / _SAMPLES)
        status = find_services(settings)
        reports = [board["probe"] for board in status.fetch_status()["boards"]] if status else []
    return {
        "samples": len(samples),
        "flat": not (grown := find_growth(samples)),
        "grown": grown,
        "boards_probed": sum(report is not None for report in reports),
        "probes_failed": sum(bool(report) and not report["passed"] and not report.get("skipped") for report in reports),
        "events": count_events(home),
        "early": summarize(early(samples)),
        "late": summarize(late(samples)),
    }


def register(home: pathlib.Path, boards: int) -> None:
    """Make the boards known, each with a seed of its own."""
    from farm.store import Store
    from farm.values import Virtual

    with Store(home / "farm.db") as store:
        for number in range(boards):
            store.boards.register(f"soak-{number + 1}", TYPE, Virtual(number))


@contextlib.contextmanager
def keep_services(home: pathlib.Path, temporary: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """The services as `farm up` starts them, ended as `farm down` ends them."""
    environment = os.environ | {
        "FARM_HOME": str(home),
        "TMPDIR": str(temporary),
        "FARM_PROBE_INTERVAL_S": str(PROBE_EVERY_S),
    }
    process = subprocess.Popen([sys.executable, "-m", "farm.services", "--stay"], env=environment, cwd="/")
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_up(settings: Any, boards: int) -> None:
    """Until every board has been reached and probed once."""
    from farm.connectivity.services import find_services
    from farm.errors import UnavailableError

    deadline = time.monotonic() + 60 + boards * _START_S_PER_BOARD
    while time.monotonic() < deadline:
        services = find_services(settings)
        with contextlib.suppress(UnavailableError):
            if services is not None and all(board["probe"] for board in services.fetch_status()["boards"]):
                return
        time.sleep(1.0)
    raise SystemExit("the boards did not come up in time")


def take_sample(at_s: float, pid: int, folders: Sequence[pathlib.Path]) -> Sample:
    """Look at the services, at all that they have started, and at the files of both."""
    memory: dict[str, int] = {}
    descriptors: dict[str, int] = {}
    threads: dict[str, int] = {}
    top = psutil.Process(pid)
    for process in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            role = name_role(process, top)
            with process.oneshot():
                memory[role] = memory.get(role, 0) + process.memory_info().rss
                descriptors[role] = descriptors.get(role, 0) + process.num_fds()
                threads[role] = threads.get(role, 0) + process.num_threads()
    files, size = 0, 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file():
                    files, size = files + 1, size + path.stat().st_size
    return Sample(at_s, memory, descriptors, threads, {"all": files}, size)


def name_role(process: psutil.Process, top: psutil.Process) -> str:
    """What a process is for, from its command."""
    if process == top:
        return "services"
    words = " ".join(process.cmdline())
    known = {"PopenTrackerServerState": "tracker", "device_agent": "boards"}
    return next((role for word, role in known.items() if word in words), "others")


def early(samples: Sequence[Sample]) -> list[Sample]:
    """The second quarter: the first one is for settling."""
    return list(samples[len(samples) // 4 : len(samples) // 2])


def late(samples: Sequence[Sample]) -> list[Sample]:
    """The last quarter."""
    return list(samples[-max(1, len(samples) // 4) :])


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians: a session that is open at one moment is none of the growth."""
    found: dict[str, Any] = {"file_bytes": statistics.median(each.file_bytes for each in samples)}
    for what in _SLACK:
        roles = sorted({role for each in samples for role in getattr(each, what)})
        found[what] = {role: statistics.median(getattr(each, what).get(role, 0) for each in samples) for role in roles}
    return found


def find_growth(samples: Sequence[Sample]) -> list[str]:
    """What is not flat, in words."""
    before, after = summarize(early(samples)), summarize(late(samples))
    return [
        f"{what} of {role}: {before[what].get(role, 0):g}, then {now:g}"
        for what, slack in _SLACK.items()
        for role, now in after[what].items()
        if now > before[what].get(role, 0) * (1 + _MOST_GROWTH) + slack
    ]


def count_events(home: pathlib.Path) -> int:
    """Of boards, all together."""
    from farm.store import Store

    with Store(home / "farm.db") as store:
        return len(store.events.fetch_of_boards())


if __name__ == "__main__":
    main()
