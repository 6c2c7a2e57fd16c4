"""Shared by all benchmarks: options, one JSON document on stdout, a description of the machine, spreads.

With `--save FOLDER` the document is also kept as FOLDER/<benchmark>.json, which `tables.py` reads. Nothing here tunes
or times anything; see `_farm.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
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
    _add_save(result)
    return result


def _add_save(parser: argparse.ArgumentParser) -> None:
    place = "such as benchmarks/results/amd-epyc-zen3"
    parser.add_argument("--save", metavar="FOLDER", help=f"keep the document in this folder, {place}")


def read_commit() -> str:
    """The checkout's commit."""
    command = ("git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def save(benchmark: str, arguments: Sequence[str], figures: Mapping[str, Any], commit: str) -> None:
    """Write `figures` to the folder that `arguments` give with --save, with machine, date, commit and command."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_save(known)
    options, others = known.parse_known_args(arguments[1:])
    if options.save is None:
        return
    if "--quick" in others:
        raise SystemExit("error: figures of a run with --quick mean nothing; leave out --save")
    document = {
        "benchmark": benchmark,
        "machine": describe(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "command": shlex.join(["python", f"benchmarks/{pathlib.Path(arguments[0]).name}", *others]),
        "figures": dict(figures),
    }
    folder = pathlib.Path(options.save)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{benchmark}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


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
    load_before, commit = os.getloadavg()[0], read_commit()

    def emit(benchmark: str, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        machine = describe() | {"load_1min_before": round(load_before, 2)}
        document = {"benchmark": benchmark, "machine": machine, "settings": dict(settings), **figures}
        os.write(kept, (json.dumps(document, indent=2) + "\n").encode())
        save(benchmark, sys.argv, figures, commit)

    try:
        yield emit
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def describe() -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    from device_agent.platforms.evidence import Machine

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
