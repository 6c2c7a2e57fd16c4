"""What one `device_agent.measure` call costs beyond the timing itself: real tracker, real agent, loopback.

Default budget: well below a minute.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import _machine
import psutil

from device_agent import protocol

SIZE = 64


def build_library(folder: pathlib.Path) -> bytes:
    """A linked 64 x 64 matmul."""
    import tvm
    from tvm import te
    from tvm.support import cc

    a, b = (te.placeholder((SIZE, SIZE), name=name) for name in "AB")
    k = te.reduce_axis((0, SIZE), name="k")
    c = te.compute((SIZE, SIZE), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    linker = folder / "zig-cc"
    linker.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang cc -fno-sanitize=undefined "$@"\n')
    linker.chmod(0o755)
    path = folder / "matmul.so"
    library = tvm.compile(te.create_prim_func([a, b, c]), target=tvm.target.Target({"kind": "llvm", "num-cores": 2}))
    library.export_library(str(path), fcompile=cc.cross_compiler(str(linker)))
    return path.read_bytes()


@contextlib.contextmanager
def running(command: list[str], ready: pathlib.Path, **options: Any) -> Iterator[None]:
    """A process that has written the file `ready`, ended after the block."""
    process = subprocess.Popen(command, cwd=_machine.ROOT, **options)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command} did not start")
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(10)


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and extremes in milliseconds."""
    ordered = sorted(value * 1e3 for value in seconds)
    picks = {"median": statistics.median(ordered), "p95": ordered[int(len(ordered) * 0.95)]}
    return {key: round(value, 3) for key, value in (picks | {"min": ordered[0], "max": ordered[-1]}).items()}


def measure_overhead(port: int, key: str, library: bytes, calls: int) -> dict[str, Any]:
    """Wall time of each call minus the time that the worker spent timing."""
    from tvm import rpc

    spec = protocol.MeasureSpec(arguments=(protocol.TensorSpec((SIZE, SIZE), "float32"),) * 3)
    session = rpc.connect_tracker("127.0.0.1", port).request(key)
    measure = session.get_function(protocol.MEASURE)
    workpath = session.get_function("tvm.rpc.server.workpath")
    overhead_s, empty_s = [], []
    text = spec.to_json()
    for _ in range(calls + 3):
        started = time.perf_counter()
        answer = measure(text, library)
        wall_s = time.perf_counter() - started
        outcome = protocol.Outcome.from_json(answer)
        if outcome.status is not protocol.Status.OK:
            raise SystemExit(f"the candidate failed: {outcome}")
        overhead_s.append(wall_s - outcome.timing_s)
        started = time.perf_counter()
        workpath("x")
        empty_s.append(time.perf_counter() - started)
    return {
        "measure_overhead_ms": summary(overhead_s[3:]),  # the first calls fill caches on both sides
        "empty_call_ms": summary(empty_s[3:]),
        "bytes_up": len(text) + len(library),
        "bytes_down": len(answer),
    }


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--calls", type=int, default=200, help="measured calls (default: 200)")
    parser.add_argument("--library-bytes", type=int, default=60_000, help="size of the candidate (default: 60000)")
    options = parser.parse_args()
    if options.quick:
        options.calls = 20
    with _machine.only_json() as emit, _machine.scratch() as folder:
        quiet = _machine.wait_until_quiet(options.quick)
        emit("agent_overhead", vars(options), {"machine_quiet": quiet} | measure(options, folder))


def measure(options: Any, folder: pathlib.Path) -> dict[str, Any]:
    """Start a tracker and an agent, and call it."""
    with contextlib.ExitStack() as stack:
        library = build_library(folder)
        from tvm.rpc.tracker import Tracker

        tracker = Tracker("127.0.0.1", port=9190, port_end=9300, silent=True)
        stack.callback(tracker.terminate)
        ready = folder / "ready.json"
        serve = ["serve", "--tracker", f"127.0.0.1:{tracker.port}", "--name", "bench", "--ready-file", str(ready)]
        command = [sys.executable, "-m", "device_agent", *serve, "--log-level", "warning"]
        stack.enter_context(running(command, ready))
        padded = library.ljust(options.library_bytes, b"\0")  # to the size of a typical candidate
        figures = measure_overhead(tracker.port, "local/bench", padded, options.calls)
        figures["unpadded"] = measure_overhead(tracker.port, "local/bench", library, options.calls)
        figures["agent_resident_mb"] = round(
            psutil.Process(json.loads(ready.read_text())["pid"]).memory_info().rss / 1e6, 1
        )
        return figures


if __name__ == "__main__":
    main()
