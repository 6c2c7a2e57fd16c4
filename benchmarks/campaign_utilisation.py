"""Measure how busy a campaign keeps its boards, and whether N boards measure N times as much as one.

Virtual boards take a set time per candidate: 2 s for one and two boards, longer for more, so that two cores can propose
and compile as fast as the boards measure. Search, compiler, wire, agent and store are real. A board is idle between a
measurement's end and the next one's start, by its own time stamps; gaps with a measurement of the reference kernel are
counted separately. `steady` leaves out each board's last trial; `whole` counts trials alone, from the first start to
the last end. Default: 1, 2, 4 and 8 boards, about 9 minutes on two cores.
"""

from __future__ import annotations

import collections
import itertools
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import _campaigns
import _machine

GOAL_BUSY, GOAL_SHARE = 0.90, 0.95
GOAL_PROMPT_S = 5.0
LONG_GAP_S = 0.3
INTERRUPT_S = 180.0
ANCHOR_SLACK = 0.15


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", default="1,2,4,8", help="numbers of boards, one campaign each (default: 1,2,4,8)")
    parser.add_argument("--seconds", default="2,2,4,8", help="how long each of them measures (default: 2,2,4,8)")
    parser.add_argument("--span", type=float, default=60.0, help="seconds of measuring in each campaign (default: 60)")
    parser.add_argument("--interrupts", type=int, default=3, help="how often Ctrl-C is pressed at the end (default: 3)")
    parser.add_argument("--tuner", default="xgb", help="how candidates are found (default: xgb)")
    options = parser.parse_args()
    if options.quick:
        options.boards, options.seconds, options.span = "2", "1", 10.0
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("campaign_utilisation", vars(options), measure(options, folder))


def measure(options: Any, folder: pathlib.Path) -> dict[str, Any]:
    counts = [int(text) for text in options.boards.split(",")]
    times = [float(text) for text in options.seconds.split(",")]
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with _campaigns.rack(max(counts)) as rack:
        start_s = time.monotonic() - began
        quiet = _machine.wait_until_quiet(options.quick)
        for index, (count, timing_s) in enumerate(zip(counts, times, strict=True)):
            rack.set_timing(timing_s)
            trials = count * max(2, round(options.span / timing_s))
            _machine.say(f"{count} boards, {timing_s:g} s per measurement, {trials} trials")
            model = _campaigns.make_model(folder / f"layers-{index}.onnx", 28 + 2 * index)
            load_before = os.getloadavg()[0]
            carried = _campaigns.run_campaign(
                f"boards-{count}-{index}", model, count, trials,
                search={"tuner": options.tuner, "seed": 0, "ops": _campaigns.KINDS},
                # As long as the set time, so that the time-outs of a campaign fit it.
                measure={"repeat": 3, "min_repeat": timing_s / 3, "timeout": timing_s + 30, "verify_top": 1},
            )  # fmt: skip
            rows.append(summarise(count, timing_s, carried) | {"load_1min_before": round(load_before, 2)})
            _machine.say(f"  {rows[-1]}")
        stopped = interrupt(folder, times[-1], options.interrupts) if options.interrupts else None
    alone = next((row for row in rows if row["boards"] == 1), None)
    if alone is not None:
        # What a board needs beside the set time, when it has the machine to itself.
        beside_s = 1 / alone["steady"]["measurements_per_s"] - alone["timing_s"]
        for row in rows:
            ideal = row["boards"] / (row["timing_s"] + beside_s)
            row["share_of_n_boards"] = _machine.round_to(row["steady"]["measurements_per_s"] / ideal, 3)
    return {
        "machine_quiet": quiet,
        "rack_start_s": round(start_s, 1),
        "goal": {"busy_with_2_boards": GOAL_BUSY, "share_of_n_boards": GOAL_SHARE},
        "busy_is": "share of its time for which a board measures: trials and the anchors by which boards are compared",
        "share_of_n_boards_is": "measurements per second over N times those of a board alone that measures as long",
        "campaigns": rows,
        "interrupt": stopped,
    }


def interrupt(folder: pathlib.Path, timing_s: float, times: int) -> dict[str, Any]:
    """Press Ctrl-C in `farm campaign run`, and in `resume` after it: how long until the prompt is back.

    The first time comes as soon as the campaign is there, while its engine starts; the others while boards measure.
    """
    import farm.settings
    from farm.store import Store

    model = _campaigns.make_model(folder / "interrupted.onnx", 40)
    file = folder / "interrupted.yaml"
    file.write_text(
        f"name: interrupted\nmodels: {model}\nboards: {{types: {_campaigns.BOARD_TYPE}}}\nbudget: {{trials: 1000}}\n"
        f"measure: {{repeat: 3, min_repeat: {timing_s / 3:.2f}s, timeout: 60s}}\n"
    )
    command = str(pathlib.Path(sys.executable).with_name("farm"))
    took_s, counted = [], 0
    with Store(farm.settings.load().home_path / "farm.db") as store:
        for number in range(times):
            words = ["run", str(file)] if number == 0 else ["resume", "interrupted"]
            process = subprocess.Popen([command, "campaign", *words], start_new_session=True, stdout=2)
            deadline = time.monotonic() + INTERRUPT_S
            while process.poll() is None and time.monotonic() < deadline:
                found = [each for each in store.campaigns.fetch() if each.name == "interrupted"]
                counted_now = int((found[0].progress or {}).get("counted", 0)) if found else 0
                if found and (number == 0 or (found[0].state == "running" and counted_now > counted + 1)):
                    counted = counted_now
                    break
                time.sleep(0.1)
            began = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            process.wait(INTERRUPT_S)
            took_s.append(round(time.monotonic() - began, 2))
            _machine.say(f"  Ctrl-C to prompt: {took_s[-1]} s, exit code {process.returncode}")
    return {"ctrl_c_to_prompt_s": took_s, "goal_s": GOAL_PROMPT_S, "trials_by_then": counted}


def summarise(count: int, timing_s: float, carried: _campaigns.Carried) -> dict[str, Any]:
    """Figures of one campaign."""
    by_board: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
    for trial in carried.trials:
        if trial["board"]:
            outcome: Mapping[str, Any] = trial["outcome"]
            spent_s = float(outcome.get("timing_s") or 0.0)
            by_board[trial["board"]].append((float(outcome["started_at"]), float(trial["held_s"]), spent_s))
    for rows in by_board.values():
        rows.sort()
    first, last = min(rows[0][0] for rows in by_board.values()), max(at + s for at, s, _ in flat(by_board))
    spans = [rows[-1][0] - rows[0][0] for rows in by_board.values()]
    inner = [row for rows in by_board.values() for row in rows[:-1]]
    usual_s = statistics.median(held for _, held, _ in flat(by_board))
    gaps = [b[0] - a[0] - a[1] for rows in by_board.values() for a, b in itertools.pairwise(rows)]
    anchors = sum(count_anchors(gap, usual_s) for gap in gaps)
    return {
        "boards": count,
        "timing_s": timing_s,
        "trials": len(carried.trials),
        "statuses": dict(collections.Counter(trial["status"] for trial in carried.trials)),
        "steady": {
            "busy": _machine.round_to((sum(held for _, held, _ in inner) + anchors * usual_s) / sum(spans), 3),
            "trials_alone": _machine.round_to(sum(held for _, held, _ in inner) / sum(spans), 3),
            "set_time_alone": _machine.round_to(sum(spent for _, _, spent in inner) / sum(spans), 3),
            "anchors": anchors,
            "measurements_per_s": _machine.round_to((len(inner) + anchors) / (sum(spans) / len(spans))),
        },
        "whole": {
            "busy": _machine.round_to(sum(s for _, s, _ in flat(by_board)) / (count * (last - first)), 3),
            "trials_per_s": _machine.round_to(len(flat(by_board)) / (last - first)),
            "seconds": round(last - first, 1),
        },
        "board_s_per_trial": _machine.spread([held for _, held, _ in flat(by_board)]),
        "gap_s": _machine.spread(gaps),
        # Seconds after the first trial's start, and how long a board then waited.
        "long_gaps_s": sorted(
            (round(b[0] - first - (gap := b[0] - a[0] - a[1]), 1), round(gap, 1))
            for rows in by_board.values()
            for a, b in itertools.pairwise(rows)
            if b[0] - a[0] - a[1] > LONG_GAP_S
        ),
        "core_s_per_trial": dict(carried.core_s_per_trial),
        "first_trial_after_s": round(first - carried.submitted_at, 1),
        "verified_after_s": round(carried.ended_at - last, 1),
    }


def count_anchors(gap_s: float, usual_s: float) -> int:
    """Count the measurements of the reference kernel that fit a gap; they belong to no trial.

    The store does not record them, but all measurements take the same time, so a gap a little longer holds one.
    """
    fits = int(gap_s / (0.97 * usual_s))
    return fits if fits and gap_s < usual_s * (fits + ANCHOR_SLACK) else 0


def flat(by_board: Mapping[str, Sequence[tuple[float, float, float]]]) -> list[tuple[float, float, float]]:
    return [row for rows in by_board.values() for row in rows]


if __name__ == "__main__":
    main()
