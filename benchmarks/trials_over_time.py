"""Best latency over trials: YOLOv4-tiny on a simulated Nano, processor and GPU, beside what its arithmetic allows.

A curve sums each function's best trial so far, or its estimate before the first; the whole model is timed without a
trial and at the end. FARM_BENCH_HOME names a home to keep: its campaigns that made the same trials are used, so that a
long run can be resumed. Default budget: 200 trials for each device, half an hour on two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import _machine

MODEL, BOARD_TYPE, DEVICES = "yolov4-tiny", "jetson-nano", ("cpu", "gpu")
# Frames a second of YOLOv4-tiny at 416x416 on a Nano, as a paper published them.
PUBLISHED_FPS = 175
# Steps of a curve that are kept.
_MOST_STEPS = 200


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=200, help="for each device (default: 200)")
    parser.add_argument("--model", default=MODEL, help=f"from `farm model zoo` (default: {MODEL})")
    parser.add_argument("--chart", type=pathlib.Path, help="folder for the chart, trials-over-time.png")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.model = 8, "tiny-cnn"
    with _machine.only_json() as emit, _machine.scratch() as folder, farm_home(folder) as home:
        figures = measure(options, home)
        if options.chart:
            draw(figures, options.chart)
        emit("trials_over_time", {"trials": options.trials, "model": options.model}, figures)


def measure(options: Any, home: pathlib.Path) -> dict[str, Any]:
    """Return a curve for each device, and the least time that arithmetic takes on it."""
    from farm.artifacts.explain import Roofline
    from farm.gpu.code import plan_gpu
    from farm.inventory.board_types import require_board_type
    from farm.search import cores, gpus

    kind = require_board_type(BOARD_TYPE)
    assert kind.target is not None
    host = kind.target.to_tvm()
    gpu = gpus.gpu_of(gpus.to_config(kind.name, plan_gpu(kind), host, simulated=True))
    peaks = {
        "cpu": Roofline.of(cores.core_of(host)).flop_per_s / cores.find_clock_factor(host, kind),
        "gpu": Roofline.of(gpu).flop_per_s,
    }
    rows = {}
    for device in DEVICES:
        document, gains = run_campaign(home, f"trials-{device}", options.model, options.trials, device=device)
        rows[device] = to_curve(document, gains) | {"peak_gflops": _machine.round_to(peaks[device] / 1e9)}
        least_s = rows[device]["gflop"] * 1e9 / peaks[device]
        rows[device]["arithmetic_ms"] = _machine.round_to(least_s * 1e3)
    needed = PUBLISHED_FPS * rows["gpu"]["gflop"]
    return {
        "model": options.model,
        "devices": rows,
        "published_fps": PUBLISHED_FPS,
        "published_needs_gflops": _machine.round_to(needed),
    }


@contextlib.contextmanager
def farm_home(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Use FARM_BENCH_HOME, or one in `folder`, with virtual boards; end its engine and services afterwards."""
    import _campaigns

    import farm.settings
    from farm.connectivity.services import find_services
    from farm.crew import local
    from farm.inventory.board_types import require_board_type
    from farm.store import Store

    home = pathlib.Path(os.environ.get("FARM_BENCH_HOME", folder / "home"))
    os.environ["FARM_HOME"] = str(home)
    home.mkdir(parents=True, exist_ok=True)
    with Store(home / "farm.db") as store:
        local.require_virtual(store, require_board_type(BOARD_TYPE), "benchmark")
    try:
        yield home
    finally:
        settings = farm.settings.load()
        _campaigns._stop_engine(settings)
        if (running := find_services(settings)) is not None:
            running.stop()


def run_campaign(
    home: pathlib.Path, name: str, model: str, trials: int, *, device: str = "cpu", whole: bool = True, **search: Any
) -> tuple[dict[str, Any], list[Any]]:
    """Tune a model on a virtual board; return the campaign's document and its counted trials that beat all before.

    A campaign in `home` that did the same is taken. Without `whole`, winners and the whole model are not timed.
    """
    import farm
    from farm.report.campaign_document import list_gains
    from farm.store import Store

    with Store(home / "farm.db") as store:
        found = store.campaigns.fetch()
        known = [each.name for each in found if each.name == name]
        known = known or [each.name for each in found if whole and _did(each, model, trials, device)]
    if not known:
        search = {"warm_start": False, "seed": 0} | search
        file = {"name": name, "models": model, "boards": {"types": BOARD_TYPE, "simulated": True}, "device": device}
        path = home / f"{name}.yaml"
        path.write_text(json.dumps(file | {"budget": {"trials": trials}, "search": search}))
        campaign = farm.Campaign.from_file(path, home).submit()
        _machine.say(f"{name}: {trials} trials")
        if whole:
            campaign.wait()
        else:
            _cancel_after(campaign, trials)
        known = [name]
    campaign = farm.Campaign.named(known[-1], home)
    with Store(home / "farm.db") as store:
        return campaign.show(), list(list_gains(store.totals.fetch_course(campaign.fetch().id)))


def _did(campaign: Any, model: str, trials: int, device: str) -> bool:
    from farm.search import gpus

    order = campaign.order
    alike = [each.name for each in order.models] == [model] and campaign.budget.trials == trials
    alike = alike and gpus.device_of(order.types[0].target) == device and order.search.tuner == "xgb"
    return bool(alike and (campaign.progress or {}).get("counted", 0) >= trials)


def _cancel_after(campaign: Any, trials: int) -> None:
    """End a campaign once its search is over."""
    while not campaign.fetch().over:
        seen = campaign.progress or {}
        if campaign.state == "verifying" or seen.get("counted", 0) >= trials:
            campaign.cancel()
        time.sleep(0.5)


def list_levels(document: Mapping[str, Any], gains: Sequence[Any]) -> Iterator[tuple[int, float]]:
    """Yield counted trials and the sum over a model's functions (s): of the best trial, or else of the estimate."""
    [curve] = document["curves"]
    best = {each["workload"]: each["predicted_s"] for each in document["winners"]}
    calls = curve["calls"]
    for counted, (_, _, workload), median_s in [(0, ("", "", ""), 0.0), *gains]:
        if workload:
            best[workload] = median_s
        if all(best[each] is not None for each in calls):
            yield counted, sum(calls[each] * best[each] for each in calls)


def to_curve(document: Mapping[str, Any], gains: Sequence[Any]) -> dict[str, Any]:
    """Return the figures of one device."""
    from farm.report import campaign_rows

    levels = list(list_levels(document, gains))
    kept = [*levels[:: max(1, len(levels) // _MOST_STEPS)], levels[-1]]
    progress = document["progress"] or {}
    final = next(iter(campaign_rows.list_finals(progress)), {})
    whole = {name: each["median"] * 1e3 for name, each in (final.get("variants") or {}).items() if each}
    [curve] = document["curves"]
    flop = sum(curve["calls"][each["workload"]] * each["flop"] for each in document["winners"])
    return {
        "trials": progress["counted"],
        "seconds": round(progress["wall_clock_s"]),
        "gflop": _machine.round_to(flop / 1e9),
        "steps_ms": [[counted, _machine.round_to(level * 1e3)] for counted, level in kept],
        "whole_ms": {name: _machine.round_to(each) for name, each in whole.items()},
    }


def draw(figures: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Draw the curves of both devices, and lines for what the arithmetic allows."""
    from farm.report import charts, drawing
    from farm.report.charts import Chart, ChartAxis, Marks, Panel, Reference

    marks, lines, rows = [], [], figures["devices"]
    last = max(each["trials"] for each in rows.values())
    for device, colour in zip(DEVICES, charts.COLOURS, strict=False):
        row = rows[device]
        steps = [*row["steps_ms"], [last, row["steps_ms"][-1][1]]]
        x, y = tuple(float(at) for at, _ in steps), tuple(float(level) for _, level in steps)
        marks.append(Marks(x, y, colour, device.upper(), line="steps", end=f"{device.upper()}: {y[-1]:.3g} ms"))
        label = f"{device.upper()} at {row['peak_gflops']:.0f} GFLOP/s: {row['arithmetic_ms']:.3g} ms"
        lines.append(Reference(colour, label, y=row["arithmetic_ms"]))
    fps = figures["published_fps"]
    lines.append(Reference(charts.RED, f"{fps} FPS: {1e3 / fps:.3g} ms", y=1e3 / fps))
    panel = Panel(
        ChartAxis("trials", low=0, form="count"), ChartAxis("latency, ms", low=0, log=True), tuple(marks), tuple(lines)
    )
    chart = Chart(
        "trials-over-time", "Best latency over trials", f"{figures['model']} on a {BOARD_TYPE}",
        "sum of each function's best trial so far; dashed: what the direct arithmetic takes at the peak in float32",
        (panel,), 3.4, True,
        f"{fps} FPS of {rows['gpu']['gflop']:.3g} GFLOP are {figures['published_needs_gflops']:,.0f} GFLOP/s. "
        "Winograd computes less.",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    drawing.save(chart, folder)


if __name__ == "__main__":
    main()
