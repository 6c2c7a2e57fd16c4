"""Check this bundle's kernels and models on this machine's NVIDIA GPU, through an agent as boards have it.

Kernels and models are compared with references and timed. Faulty kernels must end with an outcome and cost one run.
Where compute-sanitizer is found, it examines every kernel. The exit status is 1 after any wrong result, 2 without a
GPU. Work beyond the time limit is listed as not reached.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import json
import lzma
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import rpc

from device_agent import protocol
from device_agent.platforms import gpu
from device_agent.platforms.evidence import Machine
from device_agent.protocol import GPU, Engine, FaultSide, Limits, MeasureSpec, Outcome, RunSpec, TensorSpec
from device_agent.worker import engines

HERE = pathlib.Path(__file__).parent
LIBRARIES = pathlib.Path(gpu.__file__).parents[1] / "native"
TOOLS = ("memcheck", "racecheck", "synccheck")
_START_S = 60.0
# For a run: the driver compiles a model's PTX within it.
_RUN_S = 60.0
# For the report after the last check.
_SPARE_S = 15.0
# Kernels in one process of the sanitizer, which takes seconds to start.
_BATCH = 8
_FOUND = 9

Item = dict[str, Any]
Arrays = dict[str, "np.ndarray[Any, Any]"]


def draw(item: Item) -> Arrays:
    """Seeded inputs, the same with every NumPy; the last argument of a kernel, its result, holds no number."""
    values = np.random.RandomState(0)
    found = {}
    for at, (shape, dtype) in enumerate(item["arguments"]):
        floating = np.dtype(dtype).kind == "f"
        array = (values.standard_normal(shape) if floating else values.randint(0, 5, shape)).astype(dtype)
        if item["engine"] == Engine.KERNEL and at == len(item["arguments"]) - 1 and floating:
            array = np.full_like(array, np.nan)
        found[f"a{at:03}"] = array
    return found


def compare(given: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest difference of the last arrays over the largest wanted value; huge where one is not finite."""
    worst = 0.0
    for one, other in zip(given[-len(wanted) :], wanted, strict=True):
        difference = np.abs(one.reshape(other.shape).astype("f8") - other.astype("f8"))
        top = max(float(np.abs(other.astype("f8")).max()), 1e-30)
        worst = max(worst, float(np.nan_to_num(difference, nan=1e30, posinf=1e30).max()) / top)
    return worst


def read(name: str) -> bytes:
    """A library of the bundle."""
    return lzma.decompress((HERE / f"{name}.so.xz").read_bytes())


class Board:
    """An agent on this machine and a session with it. The agent is killed after `killed_s` seconds."""

    def __init__(self, folder: pathlib.Path, killed_s: float) -> None:
        ready, log = folder / "ready.json", folder / "agent.log"
        command = [sys.executable, "-m", "device_agent", "serve", "--name", "gpu", "--ready-file", str(ready)]
        command += ["--gpu-folder", str(LIBRARIES), "--exit-with-parent"]
        with log.open("wb") as file:
            self._agent = subprocess.Popen(command, stdout=file, stderr=file)
        self._timer = threading.Timer(killed_s, self._agent.kill)
        self._timer.daemon = True
        self._timer.start()
        ended = time.monotonic() + _START_S
        while not ready.exists():
            if self._agent.poll() is not None or time.monotonic() > ended:
                self.close()
                raise RuntimeError(f"the agent does not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        facts = json.loads(ready.read_text())
        self._session = rpc.connect("127.0.0.1", facts["port"], key=facts["key"])
        names = (protocol.RUN_MODEL, protocol.MEASURE)
        self._run_model, self._measure = (self._session.get_function(name) for name in names)

    def run(self, spec: RunSpec, library: bytes, inputs: Arrays) -> tuple[Outcome, list[Any]]:
        """Run a program once or more; its outputs come from the first run."""
        packed = io.BytesIO()
        np.savez(packed, **inputs)  # type: ignore[arg-type]
        text, outputs = protocol.unpack_frame(bytes(self._run_model(spec.to_json(), library, packed.getvalue())))
        return Outcome.from_json(text), list(engines.read_arrays(outputs).values())

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time a kernel by the GPU's events."""
        return Outcome.from_json(str(self._measure(spec.to_json(), library)))

    def close(self) -> None:
        """End the agent, and with it the session."""
        self._timer.cancel()
        self._agent.terminate()
        self._agent.wait()


def _limits(**more: Any) -> Limits:
    return Limits(**{"timeout_s": _RUN_S, "threads": 1} | more)


def _fail(outcome: Outcome) -> Item:
    return {"ok": False, "message": f"{outcome.status}: {outcome.message}"[:1000]}


def _has_run(outcome: Outcome) -> bool:
    """Whether the program ran to its end, at steady clocks or not."""
    return outcome.status.fault_side in (None, FaultSide.SAMPLE)


def check_program(board: Board, item: Item, runs: int) -> Item:
    """Compare a kernel's or a model's output with its reference, and time it."""
    engine, library = Engine(item["engine"]), read(item["file"])
    spec = RunSpec(engine, entry=item["entry"], device=GPU, limits=_limits(), warmup=min(2, runs - 1))
    timed, outputs = board.run(spec, library, draw(item))
    if not _has_run(timed):
        return _fail(timed)
    error = compare(outputs, list(np.load(HERE / f"{item['file']}.npz").values()))
    if engine is Engine.KERNEL:
        arguments = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in item["arguments"])
        sampling: Item = {"entry": item["entry"], "repeat": runs, "min_repeat_s": 0.0 if runs == 1 else 0.002}
        timed = board.measure(MeasureSpec(arguments, device=GPU, limits=_limits(), **sampling), library)
    elif runs > 1:
        more = RunSpec(engine, runs=runs, warmup=2, device=GPU, limits=_limits(), return_outputs=False)
        timed, _ = board.run(more, library, draw(item))
    if not _has_run(timed):
        return _fail(timed)
    samples = timed.latency_s * (2 if runs == 1 else 1)
    first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
    found = {"error": error, "median_s": median, "spread": (third - first) / median, "estimate_s": item["estimate_s"]}
    right = error <= item["tolerance"]
    return {"ok": right, "message": timed.message if right else "differs from the reference"} | found


def check_fault(board: Board, item: Item, good: bytes) -> Item:
    """Run a faulty kernel: its outcome must be the expected one, and the next kernel must run."""
    limits = _limits(timeout_s=item["timeout_s"], memory_bytes=1 << 44)
    outcome, _ = board.run(RunSpec(Engine.KERNEL, device=GPU, limits=limits), read(item["file"]), draw(item))
    after, _ = board.run(RunSpec(Engine.KERNEL, device=GPU, limits=_limits()), good, draw(item))
    if not _has_run(after):
        return _fail(after) | {"message": f"the next run: {after.status}: {after.message}"[:1000]}
    return {"ok": outcome.status == item["status"], "message": f"{outcome.status}: {outcome.message}"[:300]}


def run_once(items: list[Item]) -> None:
    """Run kernels once in this process, for the sanitizer."""
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as folder:
        for at, item in enumerate(items):
            path = pathlib.Path(folder) / f"{at}.so"
            path.write_bytes(read(item["file"]))
            spec = RunSpec(Engine(item["engine"]), entry=item["entry"], device=GPU)
            run, _ = engines.load_program(spec, path, draw(item))
            run()


def sanitize(program: str, tool: str, numbers: Sequence[int], ended: float) -> Item | None:
    """Examine kernels by one tool of the sanitizer; None where the time was not enough."""
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND)]
    command += ["--padding", "512"] if tool == "memcheck" else []
    command += [sys.executable, __file__, "--once", *map(str, numbers)]
    try:
        left = max(0.1, ended - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return None
    ok, said = done.returncode == 0, (done.stdout + done.stderr).strip()
    return {"ok": ok, "found": done.returncode == _FOUND, "message": said[-200 if ok else -2000 :]}


class Report:
    """The rows of all checks, by kind, and the checks that the time was not enough for."""

    def __init__(self, ended: float) -> None:
        self.ended = ended
        self.rows: dict[str, list[Item]] = {}
        self.not_reached: list[str] = []

    def add(self, kind: str, name: str, check: Callable[[], Item | None]) -> None:
        """Do a check if time is left, and print its row."""
        row = None
        if time.monotonic() < self.ended:
            try:
                row = check()
            except Exception as error:  # a lost agent, a damaged file: what cannot be checked is not right
                if time.monotonic() < self.ended:  # later, the agent was killed
                    row = {"ok": False, "message": f"{type(error).__name__}: {error}"[:1000]}
        if row is None:
            self.not_reached.append(f"{kind}: {name}")
            return
        self.rows.setdefault(kind, []).append({"name": name} | row)
        text = row["message"][:200].replace("\n", " ")
        if "median_s" in row:
            values = (row["error"], 1e6 * row["median_s"], 100 * row["spread"], 1e6 * row["estimate_s"])
            text = "{:9.1e} {:13.1f} us {:6.1f} % {:13.1f} us  {}".format(*values, text)
        print(f"{'ok' if row['ok'] else 'WRONG':7}{kind:11}{name[:60]:62}{text}", flush=True)

    def list_wrong(self) -> list[str]:
        """The checks that failed, with their messages."""
        rows = [(kind, row) for kind, rows in self.rows.items() for row in rows]
        return [f"{kind}: {row['name']}: {row['message']}" for kind, row in rows if not row["ok"]]


def check_by_agent(manifest: Item, report: Report, killed_s: float) -> None:
    """Check faults, kernels and models."""
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as folder:
        board = Board(pathlib.Path(folder), killed_s)
        try:
            good = read(manifest["good"])
            for item in manifest["faults"]:
                report.add("fault", item["name"], functools.partial(check_fault, board, item, good))
            for item in manifest["programs"]:
                check = functools.partial(check_program, board, item, manifest["runs"])
                report.add("kernel" if item["engine"] == Engine.KERNEL else "model", item["name"], check)
        finally:
            board.close()


def check_by_sanitizer(manifest: Item, report: Report, program: str) -> None:
    """Have compute-sanitizer examine all kernels, after one in which memcheck must find an error."""

    def control() -> Item | None:
        row = sanitize(program, "memcheck", [-1], report.ended)
        return row and row | {"ok": row["found"]}

    report.add("memcheck", "finds a write past the end", control)
    kernels = [at for at, item in enumerate(manifest["programs"]) if item["engine"] == Engine.KERNEL]
    for tool in TOOLS:
        for begin in range(0, len(kernels), _BATCH):
            batch = kernels[begin : begin + _BATCH]
            names = ", ".join(manifest["programs"][at]["name"] for at in batch)
            report.add(tool, names, functools.partial(sanitize, program, tool, batch, report.ended))


def main() -> int:
    """Run; return the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="run", description=__doc__, formatter_class=form)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all results there")
    parser.add_argument("--minutes", type=float, default=10.0, help="the time limit (default: 10)")
    parser.add_argument(
        "--sanitizer", metavar="PATH", default=shutil.which("compute-sanitizer"), help="(default: on PATH)"
    )
    parser.add_argument("--once", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    begun = time.monotonic()
    manifest = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
    if manifest["virtual"]:
        os.environ[gpu.DRIVER_VARIABLE] = str(LIBRARIES / "libcuda_virtual.so")
        os.environ.setdefault("TVM_FARM_VIRTUAL_GPU", "prove=1;estimate=0")
    gpu.use_folder(LIBRARIES, None)
    if options.once:
        run_once([[*manifest["programs"], manifest["control"]][at] for at in options.once])
        return 0
    card = gpu.probe()
    if "error" in card:
        print(f"error: this needs an NVIDIA GPU and its driver: {card['error']}", file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):
        card["driver"] = pathlib.Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    print(f"{card}\ncommit {manifest['commit']}; columns: error, median, spread, estimate for a {manifest['board']}")
    report = Report(begun + 60 * options.minutes - _SPARE_S)
    check_by_agent(manifest, report, 60 * options.minutes)
    if options.sanitizer:
        check_by_sanitizer(manifest, report, options.sanitizer)
    wrong, done = report.list_wrong(), sum(map(len, report.rows.values()))
    figures = {"card": card, "python": sys.version.split()[0], "numpy": np.__version__, "virtual": manifest["virtual"]}
    figures |= {"sanitizer": options.sanitizer, "seconds": round(time.monotonic() - begun, 1), "checks": done}
    figures |= {"wrong": wrong, "not_reached": report.not_reached, "rows": report.rows}
    if options.json:
        document = {
            "benchmark": "gpu_bundle",
            "machine": {"cpu": Machine().read_cpu_model(), "cores": os.cpu_count()},
            "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            "commit": manifest["commit"],
            "command": "gpu-bundle/run",
            "figures": figures,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        "\n".join(["", *(f"WRONG {each}" for each in wrong), *(f"not reached: {each}" for each in report.not_reached)])
    )
    print(f"{done} checks, {len(wrong)} wrong, {len(report.not_reached)} not reached, {figures['seconds']} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
