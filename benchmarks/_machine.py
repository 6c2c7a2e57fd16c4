"""What every benchmark shares: its options, one JSON document on stdout, the machine's description, spreads.

Nothing here tunes or times anything; see `_farm.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the checkout, wherever a script is started from

_DISTRIBUTIONS = ("apache-tvm", "apache-tvm-ffi", "onnxruntime", "numpy", "xgboost-cpu", "ray", "ziglang")
# A machine below this share of busy time for this long counts as quiet.
_QUIET_SHARE, _QUIET_S = 0.1, 1.0
_QUIET_TIMEOUT_S = 60.0

Emit = Callable[[str, Mapping[str, Any], Mapping[str, Any]], None]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="prove that it runs; the figures mean nothing")
    return result


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def only_json() -> Iterator[Emit]:
    """Keep stdout for the one document that the yielded function prints; all other output goes to stderr.

    Libraries and children write to descriptor 1 too, so it is the descriptor that is moved.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    load_before = os.getloadavg()[0]

    def emit(benchmark: str, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        machine = describe() | {"load_1min_before": round(load_before, 2)}
        document = {"benchmark": benchmark, "machine": machine, "settings": dict(settings), **figures}
        os.write(kept, (json.dumps(document, indent=2) + "\n").encode())

    try:
        yield emit
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def describe() -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    from device_agent.describe import Machine

    versions = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": Machine().read_cpu_model(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 4) -> dict[str, Any]:
    """Median and extremes of `values` times `scale`; quartiles too where there are four or more."""
    if not values:
        return {"count": 0, "median": None}
    ordered = sorted(value * scale for value in values)
    picks = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    if len(ordered) > 3:
        picks["q1"], _, picks["q3"] = statistics.quantiles(ordered, n=4, method="inclusive")
    return {"count": len(ordered)} | {key: round_to(value, digits) for key, value in picks.items()}


def trials_until(latencies: Sequence[float | None], goal: float) -> int | None:
    """How many trials until one was as fast as this; None where none was. A latency of None: it failed."""
    return next((count for count, each in enumerate(latencies, 1) if each is not None and each <= goal), None)


def round_to(value: float, digits: int = 4) -> float:
    """`value` with so many significant digits."""
    return float(f"{value:.{digits}g}")


@contextlib.contextmanager
def scratch() -> Iterator[pathlib.Path]:
    """A folder that goes away, holding the linker's cache for this run, so that nothing of the user's is touched."""
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as name:
        os.environ["FARM_ZIG_CACHE"] = str(pathlib.Path(name) / "zig")
        yield pathlib.Path(name)


def wait_until_quiet(quick: bool = False) -> bool:
    """Wait until nothing else computes here; False, and a line saying so, where that does not happen in time."""
    deadline = time.monotonic() + (0 if quick else _QUIET_TIMEOUT_S)
    while psutil.cpu_percent(interval=_QUIET_S) > 100 * _QUIET_SHARE:
        if time.monotonic() > deadline:
            say("the machine does not become quiet: the figures will be noisy")
            return False
    return True


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute all the while."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
