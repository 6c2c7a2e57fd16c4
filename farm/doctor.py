"""Examine the farm hop by hop: each check uses the real part, and the last one runs a kernel on the board."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from farm import emulation, linker
from farm.campaign.engine.ray_calls import ray_running
from farm.crew import calibration
from farm.crew.crew import Crew
from farm.crew.driven_board import DrivenBoard
from farm.crew.local import LocalFarm
from farm.errors import PermanentError
from farm.inventory.board_types import load_board_types
from farm.processes.machine import machine_lock
from farm.search.codegen import golden
from farm.services.board_doctor import check_boards, describe_home
from farm.services.checks import Level, Show, Work, run_chain, run_each
from farm.settings import Settings
from farm.store import Store

# For a board without other users; tried three times.
_OPEN_TIMEOUT_S = 10.0
# The tested versions; a newer tvm-ffi crashes inside TVM's tuning.
_PINS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


def examine(settings: Settings, show: Show) -> None:
    """Check all hops in order; a hop that needs a failed one is skipped. `show` gets each result at once."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Any] = {}

        def store() -> str:
            found["store"] = stack.enter_context(Store(settings.store_location))
            records = found["store"].records.fetch(simulated=None)
            simulated = sum(each.simulated for each in records)
            return f"{settings.store_location}, {len(records)} records, {simulated} of them simulated"

        def machine() -> str:
            stack.enter_context(machine_lock())
            return "no other farm command is measuring"

        def start_ray() -> str:
            stack.enter_context(ray_running(1))
            return f"{importlib.metadata.version('ray')}, local, 1 CPU"

        def farm() -> str:
            found["farm"] = stack.enter_context(LocalFarm(settings.tracker_port, settings.home_path / "logs"))
            tracker = found["farm"].tracker
            busy = "" if tracker.port == settings.tracker_port else f" ({settings.tracker_port} is in use)"
            return f"tracker on {tracker.host}:{tracker.port}{busy}, agent registered as {found['farm'].key}"

        def agent() -> str:
            at = found["farm"]
            crew = found["crew"] = stack.enter_context(Crew(settings, lambda note: None))
            board = found["board"] = crew.call(crew.take(lambda _: contextlib.nullcontext(at)))
            board.require_like({"board_type": "local"})
            about = crew.call(board.open(_OPEN_TIMEOUT_S)).to_dict()
            return (
                f"protocol {about['protocol_version']}, agent {about['agent_version']}, {about['cpu_model']}, "
                f"{len(about['cores_online'])} cores, engines {', '.join(about['engines'])}"
            )

        parts: list[tuple[str, Work]] = [
            ("packages", _packages),
            ("settings", lambda: describe_home(settings)),
            ("board types", lambda: ", ".join(sorted(load_board_types()))),
            ("linker", _link),
        ]
        everything = run_each(parts, show)
        run_each([("emulator", lambda: _emulate(settings))], show)
        if not run_each([("store", store)], show):
            return
        for check in check_boards(settings, found["store"]):
            show(check)
        hops: list[tuple[str, Work]] = [("machine", machine), ("ray", start_ray), ("tracker", farm), ("agent", agent)]
        if everything:
            hops.append(("kernel", lambda: _kernel(found["crew"], found["board"])))
        run_chain(hops, lambda check: None if check.level is Level.NOT_TRIED else show(check))


def _packages() -> str:
    names = (*_PINS, "ray", "xgboost-cpu", "numpy", "onnx", "ziglang")
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    wrong = [f"{name} is not installed" for name in names if name not in found]
    wrong += [f"{name} {found[name]}, needs {want}" for name, want in _PINS.items() if found.get(name, want) != want]
    if wrong:
        raise PermanentError("; ".join(wrong), "Install the pinned versions: make setup.")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _link() -> str:
    with tempfile.TemporaryDirectory(prefix="farm-doctor-") as folder:
        linker.warm(Path(folder), None)
    return "zig links for this machine"


def _emulate(settings: Settings) -> str:
    """Check the emulator of virtual boards; `farm doctor NAME` runs a kernel on one."""
    emulation.prepare(settings)
    return f"Unicorn {importlib.metadata.version('unicorn')}, which runs virtual boards' own code"


def _kernel(crew: Crew, board: DrivenBoard) -> str:
    """Build the golden kernel, run it on the board, and compare the result with NumPy."""
    library = golden.build(golden.plan_target(None, platform.machine()))
    outcome, outputs = crew.call(board.run(calibration.plan_run(), library, golden.make_inputs()))
    calibration.check(outcome, outputs)
    return f"the golden kernel, a matrix product, in {np.median(outcome.latency_s) * 1e3:.2f} ms, with the right result"
