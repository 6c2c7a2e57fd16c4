"""The five tuners, and convolutions alone against all operators, on ResNet-18 and a ViT for a simulated Nano's CPU.

Each is a campaign of its own that starts from nothing; winners are not measured again. A latency is the sum over the
model's functions of the best trial. Where there is none, and for the gain, it is the first trial of the tuner xgb: the
predicted schedule, measured. Default budget: 12 campaigns of 48 trials, half an hour on two cores.
"""

from __future__ import annotations

import pathlib
from typing import Any

import _machine
import trials_over_time

MODELS = "resnet18,vit_b16"


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=48, help="of each campaign (default: 48)")
    parser.add_argument("--models", default=MODELS, help=f"from `farm model zoo` (default: {MODELS})")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.models = 8, "tiny-cnn"
    with _machine.only_json() as emit, _machine.scratch() as folder, trials_over_time.farm_home(folder) as home:
        rows = measure(options, home)
        emit("tuners", {"trials": options.trials, "models": options.models}, {"rows": rows})


def measure(options: Any, home: pathlib.Path) -> list[dict[str, Any]]:
    """Return a row for each model and tuner, and for each model's convolutions."""
    from farm.search.tuners import TUNERS

    rows = []
    for model in options.models.split(","):
        searches: list[dict[str, Any]] = [{"tuner": tuner} for tuner in sorted(TUNERS, key=lambda each: each != "xgb")]
        calls: dict[str, float] = {}
        first: dict[str, float] = {}
        for search in [*searches, {"tuner": "xgb", "ops": ["conv2d"]}]:
            name = "-".join(["tuner", model, search["tuner"], *search.get("ops", ())]).replace(".", "_")
            found, gains = trials_over_time.run_campaign(home, name, model, options.trials, whole=False, **search)
            best = {workload: median_s for _, (_, _, workload), median_s in gains}  # the last gain is the best
            if not first:
                [curve] = found["curves"]
                calls = curve["calls"]
                first = {each["workload"]: each["predicted_s"] for each in found["winners"]}
                first |= {workload: median_s for _, (_, _, workload), median_s in reversed(gains)}
            before, after = (sum(calls[each] * known[each] for each in calls) for known in (first, {**first, **best}))
            rows.append(
                {
                    "model": model,
                    "tuner": search["tuner"],
                    "ops": ",".join(search.get("ops", ())) or "all",
                    "tried": len(best),
                    "functions": len(calls),
                    "trials": found["progress"]["counted"],
                    "seconds": round(found["progress"]["wall_clock_s"]),
                    "first_ms": _machine.round_to(before * 1e3),
                    "best_ms": _machine.round_to(after * 1e3),
                    "gain": _machine.round_to(before / after, 3),
                }
            )
            _machine.say(str(rows[-1]))
    return rows


if __name__ == "__main__":
    main()
