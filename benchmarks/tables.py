"""Write the tables of docs/ from benchmarks/results/<machine>/<benchmark>.json; `make generated` runs it.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A benchmark writes its file with `--save FOLDER`.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = tuple(
    ROOT / name
    for name in (
        "README.md",
        *(f"docs/{page}.md" for page in ("performance", "fidelity", "gpu", "sweeps", "kernels/arm")),
    )
)
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Single figures: what is measured, unit, benchmark, path inside its figures, goal.
_SINGLE = (
    ("Time a trial adds to what the board times", "ms", "agent_overhead", "measure_overhead_ms median", "≤20"),
    ("Pin the clocks of a virtual Nano and verify them", "ms", "clocks", "boards jetson-nano pin_ms median", "≤150"),
    ("SQLite: trials written in batches of 100", "1/s", "store_scale", "sqlite batched_inserts_per_second", "≥2000"),
    ("PostgreSQL: the same", "1/s", "store_scale", "postgresql batched_inserts_per_second", "≥2000"),
    ("Web page of a campaign of 100,000 trials, SQLite", "ms", "web_pages", "sqlite pages campaign ms median", "≤300"),
    ("50 watchers of the web page: share of a core", "%", "web_pages", "sqlite watching core_percent", "≤5"),
)  # fmt: skip
# Rows of quickstart: name, path, goal.
_QUICKSTART = (
    ("untuned TVM, ms", "latency_ms untuned median", ""),
    ("prediction, no trial, ms", "latency_ms predicted median", ""),
    ("with all records, ms", "latency_ms tuned median", ""),
    ("ONNX Runtime, ms", "latency_ms onnxruntime median", ""),
    ("compiled model over ONNX Runtime", "figures ratio_to_onnxruntime median", "≤0.85"),
    ("until the first trial, s", "figures seconds_to_first_trial median", "≤30"),
    ("in all, s", "figures seconds_total median", "≤150"),
)
# Rows of the sweeps' accuracy: name, path inside a grid, goal.
_SWEEPS = (
    ("points measured, mean", "points_mean", "≤60 (TX2)"),
    ("visits, mean", "visits_mean", ""),
    ("share of the front's hypervolume, mean", "hypervolume_mean", "≥0.98"),
    ("share of the front's hypervolume, worst board", "hypervolume_ratio min", ""),
    ("boards whose pick is within 3 % of the least energy", "pick_within_3_percent_share", "≥0.95"),
    ("more energy than the least, worst pick", "pick_regret max", ""),
    ("boards whose pick keeps the deadline", "deadline_kept_share", "≥0.99"),
    ("95 % intervals that hold: measured latency", "interval_coverage measured_latency", "0.93-0.97"),
    ("95 % intervals that hold: measured energy", "interval_coverage measured_energy", "0.93-0.97"),
    ("95 % intervals that hold: predicted latency", "interval_coverage predicted_latency", "0.93-0.97"),
    ("95 % intervals that hold: predicted energy", "interval_coverage predicted_energy", "0.93-0.97"),
    ("sweeps voided for drift", "voided", ""),
)

# Tables of a run of the tests: key, head, paths.

Row = tuple[object, ...]


def read_results(benchmark: str) -> list[dict[str, Any]]:
    """Read what is kept of a benchmark: one document per machine, each with its folder's name as `on`."""
    paths = sorted(RESULTS.glob(f"*/{benchmark}.json"))
    return [json.loads(path.read_text(encoding="utf-8")) | {"on": path.parent.name} for path in paths]


def find_figure(figures: Any, path: str) -> Any:
    """Find one figure by the keys that lead to it; "–" where there is none."""
    for key in path.split():
        if not isinstance(figures, Mapping) or key not in figures:
            return "–"
        figures = figures[key]
    return figures


def to_table(head: Row, rows: Iterable[Row]) -> str:
    """Set rows as a Markdown table; columns that no row fills are left out."""
    cells = [[_to_cell(value) for value in row] for row in (head, *rows)]
    kept = [at for at in range(len(head)) if any(row[at] not in ("", "–") for row in cells[1:])]
    lines = ["| " + " | ".join(row[at] for at in kept) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(kept), *lines[1:]]) + "\n"


def _to_cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def to_sources(results: Iterable[Mapping[str, Any]]) -> str:
    """Say by which command, where, when and at which commit the figures of a table were made."""
    found: dict[str, list[str]] = {}
    for each in results:
        found.setdefault(each["command"], []).append(f"{each['on']} ({each['date']}, {each['commit']})")
    return "".join(f"\n`{command}`: {', '.join(places)}.\n" for command, places in found.items())


def make_engines(results: list[dict[str, Any]]) -> str:
    """Compare predicted models with other engines: a row per model and thread count, columns for each machine."""
    engines = {"over ONNX Runtime": "onnxruntime", "over ncnn": "ncnn"}
    paths = {name: f"ratio_to {engine}" for name, engine in engines.items()} | {"ms": "latency_ms ours median"}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for each in results:
        for model in each["figures"]["models"]:
            for threads, figures in model["threads"].items():
                found.setdefault((model["name"], threads), {})[each["on"]] = figures
    columns = [(each["on"], name, path) for each in results for name, path in paths.items()]
    head = ("model", "threads", *(f"{on}: {name}" for on, name, _ in columns))
    return to_table(
        head, ((*key, *(find_figure(row.get(on), path) for on, _, path in columns)) for key, row in found.items())
    )


def make_small_models(results: list[dict[str, Any]]) -> str:
    """Summarise thirty small models, over ONNX Runtime."""
    head = ("machine", "threads", "median over ONNX Runtime", "worst", "faster", "median over the prediction")
    paths = ("median", "worst", "faster", "over_untried median")
    rows = (
        (each["on"], threads, *(find_figure(summary, path) for path in paths))
        for each in results
        for threads, summary in each["figures"]["summary"].items()
    )
    return to_table(head, rows)


def make_quickstart(results: list[dict[str, Any]]) -> str:
    """Compare `farm quickstart` on several machines."""
    head = ("squeezenet1.1, 128 trials", "goal", *(each["on"] for each in results))
    rows = ((name, goal, *(find_figure(each["figures"], path) for each in results)) for name, path, goal in _QUICKSTART)
    return to_table(head, rows)


def make_utilisation(results: list[dict[str, Any]]) -> str:
    """Say how busy the boards of a campaign are."""
    head = ("machine", "boards", "s per measurement", "busy", "throughput over N boards", "host CPU s per trial")
    paths = ("boards", "timing_s", "steady busy", "share_of_n_boards")
    rows = (
        (each["on"], *(find_figure(row, path) for path in paths), _sum_host(row.get("core_s_per_trial", {})))
        for each in results
        for row in each["figures"]["campaigns"]
    )
    return to_table(head, rows)


def _sum_host(core_s: Mapping[str, float]) -> float | str:
    """Sum what the host used for a trial; simulated boards are no part of it."""
    return round(sum(value for name, value in core_s.items() if name != "boards"), 2) or "–"


def make_metaschedule(results: list[dict[str, Any]]) -> str:
    """Compare campaigns with stock MetaSchedule on the same boards."""
    ratios = ("ratio", "goal", "ratio_without_imports", "ratio_with_winners_checked")
    paths = ("boards", "wall_s ours", "wall_s stock", *ratios)
    head = ("boards", "ours, s", "stock, s", "ratio", "goal (at most)", "without stock's imports", "with verification")
    rows = ((each["on"], *row) for each in results for row in _rows([each], "runs", paths))
    return to_table(("machine", *head), rows)


def make_estimates(results: list[dict[str, Any]]) -> str:
    """Give the estimated latencies of whole models on a simulated board."""
    head = ("board type", "model", "weights", "1 core, ms", "4 cores, ms")
    rows = (
        (each["figures"]["board_type"], model["model"], model["weights"], *(row["price_ms"] for row in model["rows"]))
        for each in results
        for model in each["figures"]["models"]
    )
    return to_table(head, rows)


def make_instructions(results: list[dict[str, Any]]) -> str:
    """Compare executed instructions with other engines."""
    head = ("model", "ours, million", "ONNX Runtime", "ncnn", "ours over ONNX Runtime", "over ncnn")
    paths = tuple(f"inference {name} million_instructions" for name in ("ours", "onnxruntime", "ncnn"))
    return to_table(head, _rows(results, "models", ("name", *paths, "ratio_to onnxruntime", "ratio_to ncnn")))


def make_gpu(results: list[dict[str, Any]]) -> str:
    """Compare estimated latencies of GPUs with published ones."""
    ours = ("board", "model", "precision", "estimate, ms", "FMAs alone", "error")
    head = (*ours, "published", "estimate over it")
    own = ("board", "model", "precision", "price_ms", "compute_ms", "error")
    paths = (*own, "published_ms", "price_over_published")
    return to_table(head, _rows(results, "rows", paths))


def make_nano(_: list[dict[str, Any]]) -> str:
    """Set a Nano's GPU beside its CPU, from the results of two benchmarks."""
    cpu = {
        model["model"]: model["rows"][-1]["price_ms"]
        for each in read_results("emulated_price")
        for model in each["figures"]["models"]
        if model["weights"] == "float32"
    }
    gpu = {
        (row["model"], row.get("precision")): row
        for each in read_results("gpu_prices")
        for row in each["figures"]["rows"]
        if row.get("board") == "jetson-nano"
    }
    head = ("model", "CPU, 4 cores, ms", "GPU, float32", "GPU, float16", "TensorRT, float16, published")
    rows: list[Row] = []
    for name, milliseconds in cpu.items():
        half = find_figure(gpu.get((name, "float16")), "price_ms")
        published = find_figure(gpu.get((name, "float16")), "published_ms")
        rows.append((name, milliseconds, find_figure(gpu.get((name, "float32")), "price_ms"), half, published))
    return to_table(head, rows)


def make_gpu_estimates(results: list[dict[str, Any]]) -> str:
    """Compare estimated latencies of a GPU's kernels with measured ones, by group."""
    head = ("kernels", "n", "rank", "rank of FLOP/s", "factor", "median error", "90 % below", "worst")
    errors = ("median_error", "error_of_90_percent", "worst_error")
    return to_table(head, _rows(results, "rows", ("group", "kernels", "rank", "rank_of_shares", "factor", *errors)))


def make_bundle(results: list[dict[str, Any]]) -> str:
    """Say on which GPUs `gpu-bundle/run` ran: keep its file as results/<card>/gpu_bundle.json."""
    head = ("card", "driver", "commit", "checks", "wrong", "not reached")
    rows: list[Row] = []
    for each in results:
        found = each["figures"]
        card = (found["card"]["name"], found["card"].get("driver"))
        rows.append((*card, each["commit"], found["checks"], len(found["wrong"]), len(found["not_reached"])))
    return to_table(head, rows) if results else "No card yet.\n"


def make_published(results: list[dict[str, Any]]) -> str:
    """Compare estimated latencies of ncnn's library with its published ones: one row per board and thread count."""
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in (row for each in results for row in each["figures"]["rows"]):
        key = (row["board"], row["core"], row["threads"])
        found.setdefault(key, {})[row["model"]] = row["price_over_published"]
    models = list(next(iter(found.values()), {}))
    return to_table(("board", "core", "threads", *models), ((*key, *ratios.values()) for key, ratios in found.items()))


def make_power(results: list[dict[str, Any]]) -> str:
    """Say how far simulated watts and frame rates are from published ones; held out: fitted to the other rows."""
    head = ("rows", "figure", "n", "median error", "worst", "held out: median", "worst")
    rows: list[Row] = []
    for each in results:
        figures = each["figures"]
        for name in (name for name in figures if name.endswith(".csv") or name == "mlperf"):
            for figure, found in figures[name].items():
                held = figures["held_out"].get(figure, {}) if name == "tx2_gpu_rails.csv" else {}
                errors = (
                    found["median_error"],
                    found["worst_error"],
                    held.get("median_error"),
                    held.get("worst_error"),
                )
                rows.append((name.removesuffix(".csv"), figure, found["rows"], *errors))
    return to_table(head, rows)


def make_sweeps(results: list[dict[str, Any]]) -> str:
    """Say how accurate sweeps are, one column per grid."""
    grids = {name: grid for each in results for name, grid in each["figures"]["grids"].items()}
    head = ("figure", "goal", *(f"{name}, {grid['grid_points']} points" for name, grid in grids.items()))
    rows = ((name, goal, *(find_figure(grid, path) for grid in grids.values())) for name, path, goal in _SWEEPS)
    return to_table(head, rows)


def make_single(_: list[dict[str, Any]]) -> str:
    """List single figures, each with its goal and its machine."""
    rows = (
        (f"{name}{unit and ', '}{unit}", find_figure(each["figures"], path), goal, benchmark, each["on"])
        for name, unit, benchmark, path, goal in _SINGLE
        for each in read_results(benchmark)
    )
    return to_table(("figure", "value", "goal", "benchmark", "machine"), rows)


def make_trials(results: list[dict[str, Any]]) -> str:
    """Say how latency falls over trials on a processor and a GPU, and what their arithmetic allows at most."""
    head = ("device", "trials", "first sum, ms", "last sum", "whole model, no trial", "after all", "s a trial")
    rows: list[Row] = []
    for each in results:
        for device, row in each["figures"]["devices"].items():
            (_, first), *_, (_, last) = row["steps_ms"]
            whole = (find_figure(row, f"whole_ms {name}") for name in ("predicted", "recorded"))
            ends = (row["seconds"] / row["trials"], row["peak_gflops"], row["arithmetic_ms"])
            rows.append((device, row["trials"], first, last, *whole, *ends))
    return to_table((*head, "peak GFLOP/s in float32", "all FLOP at the peak, ms"), rows)


def _rows(results: Iterable[Mapping[str, Any]], key: str, paths: Iterable[str]) -> Iterator[Row]:
    wanted = tuple(paths)
    for each in results:
        for row in each["figures"][key]:
            yield tuple(find_figure(row, path) for path in wanted)


TABLES = {
    "quickstart": make_quickstart,
    "vs_engines": make_engines,
    "thirty_models": make_small_models,
    "vs_metaschedule": make_metaschedule,
    "campaign_utilisation": make_utilisation,
    "emulated_price": make_estimates,
    "emulated_instructions": make_instructions,
    "gpu_prices": make_gpu,
    "nano": make_nano,
    "gpu_estimates": make_gpu_estimates,
    "gpu_bundle": make_bundle,
    "published_prices": make_published,
    "published_power": make_power,
    "sweep_accuracy": make_sweeps,
    "trials_over_time": make_trials,
    "single_figures": make_single,
}


def fill(page: str) -> str:
    """Replace each table of a page by one made from the kept results."""

    def make(match: re.Match[str]) -> str:
        results = read_results(match[2])
        return f"{match[1]}{TABLES[match[2]](results)}{to_sources(results)}{match[3]}"

    return _PLACE.sub(make, page)


def main() -> None:
    """Write the pages."""
    for path in PAGES:
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
