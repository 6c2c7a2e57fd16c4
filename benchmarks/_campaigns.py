"""A farm of virtual boards that take a set time to measure, and campaigns on it, for the benchmarks of campaigns.

Everything is the product's own: services, agents, engine and store, in a home that goes away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import _machine
import psutil

BOARD_TYPE = "jetson-nano"
# Of a model's workloads; others, which only change layouts, have next to nothing to search. The depthwise convolution
# has the transposition before it with it, and counts as `conv2d` then.
KINDS = ("conv2d", "dense")
# Boards that start all at once on two cores take a minute; a probe takes seconds and waits for its turn.
_READY_S = 300.0
_CAMPAIGN_S = 3600.0
_NOTE_INTERVAL_S = 15.0
# Processor time per trial is counted from this trial on: the first ones come with starting everything.
_SETTLED = 4


@dataclasses.dataclass(frozen=True)
class Rack:
    """A running farm. `boards` are names in the order in which `only` takes them; `tracker` is where they register."""

    home: pathlib.Path
    temporary: pathlib.Path
    boards: tuple[str, ...]
    tracker: tuple[str, int]

    def set_timing(self, seconds: float) -> None:
        """Have every board take so long to time a candidate from now on."""
        from farm.virtual.client import SimulatedTree
        from farm.virtual.tree import FAULT

        sockets = list(self.temporary.glob("device-rig-*/board.sock.root"))
        if len(sockets) != len(self.boards):
            raise SystemExit(f"{len(sockets)} virtual boards run, and {len(self.boards)} should")
        for socket in sockets:
            tree = SimulatedTree(f"{socket}")
            tree.write(FAULT, "clear")
            tree.write(FAULT, f"timing:{seconds:g}")

    def key(self, board: str) -> str:
        """What a board is registered as."""
        return f"{BOARD_TYPE}/{board}"


@contextlib.contextmanager
def rack(count: int, **settings: str) -> Iterator[Rack]:
    """`count` boards that are fit for work, labelled so that a campaign can take the first few; FARM_ settings too."""
    import farm.settings
    from farm.connectivity.services import find_services, start_services
    from farm.store import Store

    # Told to end, the benchmark leaves nothing running either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Short: Ray's sockets lie below it, and a socket's path may have 107 characters.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fb-", dir="/tmp"))
    temporary = folder / "t"
    temporary.mkdir()
    before = dict(os.environ)
    changes = {"FARM_HOME": str(folder / "home"), "TMPDIR": str(temporary), "FARM_PROBE_INTERVAL_S": "0"} | settings
    os.environ.update(changes)
    tempfile.tempdir = None
    names = tuple(f"nano-{index + 1}" for index in range(count))
    loaded = farm.settings.load()
    try:
        with Store(loaded.home_path / "farm.db") as store:
            for index, name in enumerate(names):
                _register(store, index, name, count)
        services, _ = start_services(loaded)
        try:
            deadline = time.monotonic() + _READY_S
            for name in names:
                services.wait_reachable(name, deadline - time.monotonic())
            for report in services.probe(names, deadline - time.monotonic()):
                _machine.say(f"  probed {report}"[:120])
            yield Rack(loaded.home_path, temporary, names, services.info["tracker"])
        finally:
            _stop_engine(loaded)
            running = find_services(loaded)
            if running is not None:
                running.stop()
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)


def _register(store: Any, index: int, name: str, count: int) -> None:
    from farm.values import Virtual

    labels = {f"first-{size}": "yes" for size in range(index + 1, count + 1)}
    store.boards.register(name, BOARD_TYPE, Virtual(index, ("timing:1",)), labels)


def _stop_engine(settings: Any) -> None:
    from farm.campaign.engine.state import ENGINE

    ENGINE.stop(settings.home_path)


@dataclasses.dataclass(frozen=True)
class Carried:
    """A campaign that was carried out. Times are seconds on the wall clock."""

    submitted_at: float
    began_at: float
    ended_at: float
    trials: Sequence[Mapping[str, Any]]
    workloads: Sequence[Any]
    engine_rss: Sequence[tuple[int, int]]
    core_s_per_trial: Mapping[str, float]

    @property
    def first_at(self) -> float:
        """When a board began with the first trial."""
        return min(float(trial["outcome"]["started_at"]) for trial in self.trials if trial["board"])

    @property
    def searched_at(self) -> float:
        """When the last trial of the search had been counted."""
        return max(float(trial["recorded_at"]) for trial in self.trials)


def run_campaign(name: str, model: pathlib.Path, boards: int, budget: Any, **sections: Mapping[str, Any]) -> Carried:
    """Run one on the first `boards` boards, to its end; raises SystemExit where that is not a good one."""
    import farm
    import farm.settings
    from farm.campaign.engine.control import wait_settled
    from farm.store import Store
    from farm.types.campaigns import FleetCampaign

    campaign = farm.Campaign(
        name=name, models=str(model), boards={"types": BOARD_TYPE, "labels": {f"first-{boards}": "yes"}}, budget=budget,
        **sections,
    )  # fmt: skip
    submitted_at = time.time()
    campaign.submit()
    loaded = farm.settings.load()
    said = time.monotonic()
    sizes: list[tuple[int, int]] = []
    began_at = 0.0
    engine = spent = None
    from_trial = to_trial = 0

    def look(seen: FleetCampaign) -> None:
        nonlocal said, began_at, engine, spent, from_trial, to_trial
        engine = engine or _find_engine(seen)
        counted = int((seen.progress or {}).get("counted", 0))
        if spent is None and engine is not None and counted >= _SETTLED:
            spent, from_trial = Spent([engine.pid, find_running_pid(loaded)]), counted
            spent.begin()
        if spent is not None and counted > to_trial and seen.state == "running":
            to_trial = counted
            spent.look()
        began_at = began_at or (time.time() if seen.engine else 0.0)
        if engine is not None and (not sizes or counted > sizes[-1][0]):
            with contextlib.suppress(psutil.Error):
                sizes.append((counted, engine.memory_info().rss))
        if time.monotonic() - said > _NOTE_INTERVAL_S:
            said = time.monotonic()
            _machine.say(f"  {name}: {seen.state}, {counted} trials counted")

    with Store(loaded.home_path / "farm.db") as store:
        seen = wait_settled(loaded, store, name, _CAMPAIGN_S, look)
        ended_at = time.time()
        if seen.state != "finished":
            raise SystemExit(f"campaign {name} is {seen.state}: {seen.reason}")
        trials = store.trials.fetch(seen.id, purpose="search")
        workloads = store.workloads.fetch(seen.id)
    each = spent.core_s(1 / (to_trial - from_trial)) if spent is not None and to_trial > from_trial else {}
    return Carried(submitted_at, began_at, ended_at, trials, workloads, sizes, each)


def find_running_pid(settings: Any) -> int:
    """The process of the services."""
    from farm.connectivity.services import find_services

    services = find_services(settings)
    if services is None:
        raise SystemExit("the farm's services are gone")
    return services.info["pid"]


def _find_engine(campaign: Any) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error, TypeError, KeyError):
        return psutil.Process(int(campaign.engine["pid"]))
    return None


def make_model(
    path: pathlib.Path, size: int = 28, layers: Sequence[str] = ("conv", "depthwise", "dense")
) -> pathlib.Path:
    """An ONNX file with a convolution, a depthwise convolution and a matrix product side by side.

    `size` makes the workloads of one file others than those of another.
    """
    import numpy as np
    import onnx

    random = np.random.default_rng(0)
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT

    def weight(name: str, *shape: int) -> Any:
        return onnx.numpy_helper.from_array((random.standard_normal(shape) / 16).astype("float32"), name)

    parts = {
        "conv": (
            [helper.make_node("Conv", ["x", "kernel"], ["c"], pads=[1] * 4), helper.make_node("Relu", ["c"], ["of_x"])],
            [1, 32, size, size], [1, 48, size, size], ("kernel", 48, 32, 3, 3), "x",
        ),
        "depthwise": (
            [
                helper.make_node("Conv", ["y", "depth"], ["d"], pads=[1] * 4, group=96),
                helper.make_node("Relu", ["d"], ["of_y"]),
            ],
            [1, 96, size, size], [1, 96, size, size], ("depth", 96, 1, 3, 3), "y",
        ),
        "dense": (
            [helper.make_node("MatMul", ["z", "matrix"], ["m"]), helper.make_node("Relu", ["m"], ["of_z"])],
            [size * 2, 256], [size * 2, 192], ("matrix", 256, 192), "z",
        ),
    }  # fmt: skip
    chosen = [parts[layer] for layer in layers]
    graph = helper.make_graph(
        [node for part in chosen for node in part[0]],
        "layers",
        [helper.make_tensor_value_info(part[4], kind, part[1]) for part in chosen],
        [helper.make_tensor_value_info(f"of_{part[4]}", kind, part[2]) for part in chosen],
        [weight(*part[3]) for part in chosen],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


class Spent:
    """Processor time by part of the farm, of the engine's process, the services' and all that they started.

    Part of a process's time that it spent after it was last looked at is missed where it has ended.
    """

    # What a command line holds, and whose it is; the first that fits.
    _PARTS = (
        ("ray::SearchActor", "search"), ("ray::Builder", "compilers"),
        ("farm.campaign.engine", "engine"), ("device_agent", "boards"), ("ray", "ray"), ("farm.services", "services"),
    )  # fmt: skip

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in roots]
        self._parts: dict[int, str] = {}
        self._latest: dict[int, float] = {}
        self._before: dict[int, float] = {}

    def begin(self) -> None:
        """Count from here."""
        self.look()
        self._before = dict(self._latest)

    def look(self) -> None:
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                for process in (root, *root.children(recursive=True)):
                    self._look_at(process)

    def core_s(self, share: float) -> dict[str, float]:
        """Core-seconds by part since the beginning, times `share`."""
        total: dict[str, float] = {}
        for pid, spent_s in self._latest.items():
            part = self._parts[pid]
            total[part] = total.get(part, 0.0) + share * (spent_s - self._before.get(pid, 0.0))
        return {part: round(spent_s, 3) for part, spent_s in sorted(total.items())}

    def _look_at(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            command = " ".join(process.cmdline())
            part = next((name for mark, name in self._PARTS if mark in command), "others")
            # Children that ended count with the parent that waited for them: workers of an agent, linkers.
            spent_s = times.user + times.system + times.children_user + times.children_system
            self._parts[process.pid] = part
            self._latest[process.pid] = spent_s
