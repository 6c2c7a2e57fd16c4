"""Runs a suite as pytest processes side by side: most tests wait, and two waits fit on one machine.

`python tests/run_shards.py [--suite NAME] [pytest options]`; the options go to each process. What a shard prints comes
line by line behind its name, and once more in a few lines at the end. Which folder tests what is in CONTRIBUTING.md.

What failed beside the others runs once more with the machine to itself: passing then, it is named as unsteady,
which is a defect of its own, but no reason to say that the change does not work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

# Halves in time, not in number. Two keep two cores busy: four parts took as long (34 minutes), and missed deadlines.
# What tests of both need for themselves (homes, ports, networks) they do not share.
SHARDS: Mapping[str, Sequence[str]] = {
    "acceptance": (
        "tests/acceptance",
        "--ignore=tests/acceptance/test_campaign_chaos.py",
        "--ignore=tests/acceptance/test_provision.py",
    ),
    # Integration first: its candidates load TVM's compiler, which cannot follow the runtime alone into a process.
    # Whatever provisions boards is here, one after the other: this machine's accounts are theirs.
    "others": (
        "tests/integration",
        "tests/contract",
        "tests/unit",
        "tests/acceptance/test_provision.py",
        "tests/acceptance/test_campaign_chaos.py",
    ),
}
# One process: the board's deadlines of a second are kept by this machine's processors.
REAL_KERNEL_CORE: Mapping[str, Sequence[str]] = {"real kernel": ("tests/real_kernel", "-m", "core")}
# What pytest and its fixtures may take to stop everything that runs; then they are killed.
STOP_TIMEOUT_S = 60.0
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FAILED, _NOTHING_CHOSEN = 1, 5  # pytest's exit codes: tests failed; options such as -k leave no test
# More than so many are no accident of the machine. With a real kernel, eleven may share one board.
MOST_UNSTEADY = 8
SUITES = {"all": (SHARDS, MOST_UNSTEADY), "real-kernel-core": (REAL_KERNEL_CORE, 12)}
_SAID_AT_THE_END = ("FAILED ", "ERROR ", "SKIPPED ", "=====")


class Shard:
    """One pytest process and what it said; `cache` is a folder of its own for pytest."""

    def __init__(self, index: int, name: str, folders: Sequence[str], options: Sequence[str], cache: str) -> None:
        self.index, self.name, self.folders, self.lines = index, name, folders, list[str]()
        self._cache = cache
        command = [sys.executable, "-u", "-m", "pytest", "--durations=30", "-o", f"cache_dir={cache}", *options]
        command += folders
        # In a session of its own, so that a terminal's Ctrl-C comes to it once, through us: a second one would cut its
        # fixtures' ends short.
        self.process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=os.environ | {"FARM_TEST_SHARD": str(index)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))
            print(f"{self.name:>10} | {self.lines[-1]}", flush=True)

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout=5.0)  # its last lines; a process that it left behind may hold the pipe open
        return code

    def failed(self) -> list[str]:
        """The tests that failed, by pytest's names."""
        try:
            return sorted(json.loads((pathlib.Path(self._cache) / "v" / "cache" / "lastfailed").read_text()))
        except FileNotFoundError:
            return []

    def stopped_early(self) -> bool:
        """Whether options such as -x ended it before all tests had run."""
        return any("stopping after" in line for line in self.lines)

    def once_more(self, options: Sequence[str]) -> Shard:
        """Begin with what failed again."""
        print(f"\n{self.name}: once more, alone: {', '.join(self.failed())}", flush=True)
        return Shard(self.index, self.name, self.folders, [*options, "--lf", "--lfnf=none"], self._cache)

    def stop(self, deadline: float) -> None:
        """Have it end its tests' processes and itself, by force after the deadline (monotonic seconds)."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(max(0.0, deadline - time.monotonic()))
        if self.process.poll() is None:
            print(f"{self.name} does not end and is killed", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.wait()

    def summary(self) -> list[str]:
        """What pytest says at its end, from its last section's title on."""
        titles = [index for index, line in enumerate(self.lines) if "short test summary info" in line]
        start = titles[-1] if titles else max(0, len(self.lines) - 1)
        return [line for line in self.lines[start:] if line.startswith(_SAID_AT_THE_END) or line == self.lines[-1]]


def main(
    options: Sequence[str], shards: Mapping[str, Sequence[str]] = SHARDS, most_unsteady: int = MOST_UNSTEADY
) -> int:
    """Run all shards to their ends; the exit code is 0 where every one passed, else the first failure's."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    running: list[Shard] = []
    unsteady: list[str] = []
    with tempfile.TemporaryDirectory(prefix="farm-shards-") as caches:
        try:
            for index, (name, folders) in enumerate(shards.items()):
                running.append(Shard(index, name, folders, options, os.path.join(caches, name)))
            codes = [shard.wait() for shard in running]
            first = list(zip(running, codes, strict=True))
            if sum(len(shard.failed()) for shard, _ in first) <= most_unsteady:
                for position, (shard, code) in enumerate(first):
                    if code == _FAILED and not shard.stopped_early() and (suspects := shard.failed()):
                        running.append(again := shard.once_more(options))
                        codes[position] = again.wait()
                        unsteady += [each for each in suspects if each not in again.failed()]
        except KeyboardInterrupt:
            _stop(running)
            return 130
        for shard, code in first:
            print(f"\n{shard.name}: exit code {code}")
            print("\n".join(shard.summary()))
        for name in unsteady:
            print(f"\nunsteady: {name} failed beside the other tests and passed alone")
    print(f"\nall after {time.monotonic() - began:.0f} s", flush=True)
    if all(code == _NOTHING_CHOSEN for code in codes):
        return _NOTHING_CHOSEN
    return next((code for code in codes if code not in (0, _NOTHING_CHOSEN)), 0)


def _stop(running: Sequence[Shard]) -> None:
    """Have all end their tests in their own order."""
    print("stopping the tests", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has a deadline
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for shard in running:
        if shard.process.poll() is None:
            shard.process.send_signal(signal.SIGINT)
    for shard in running:
        shard.stop(deadline)


def _parse(arguments: Sequence[str]) -> tuple[list[str], Mapping[str, Sequence[str]], int]:
    """What `main` takes: the options that are pytest's, the suite's shards, and how many may be unsteady."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--suite", choices=SUITES, default="all")
    ours, options = parser.parse_known_args(arguments)
    return options, *SUITES[ours.suite]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(*_parse(sys.argv[1:])))
