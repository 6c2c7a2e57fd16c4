"""Documents of sweeps as `farm sweep show --json` prints them, from a small model of a board, and points of them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import OperatingPoint
from farm.sweep.export import chosen as export
from farm.sweep.export.chosen import Chosen

NANO_HZ = (
    102_000_000, 204_000_000, 307_200_000, 403_200_000, 518_400_000, 614_400_000, 710_400_000, 825_600_000,
    921_600_000, 1_036_800_000, 1_132_800_000, 1_224_000_000, 1_326_000_000, 1_428_000_000, 1_479_000_000,
)  # fmt: skip
TX2_HZ = (345_600_000, 652_800_000, 960_000_000, 1_267_200_000, 1_574_400_000, 2_035_200_000)
TX2_GPU_HZ = (114_750_000, 420_750_000, 854_250_000, 1_300_500_000)


def estimate(value: float, share: float = 0.01) -> dict[str, float]:
    return {"value": value, "low": value * (1 - share), "high": value * (1 + share)}


def row(
    key: str,
    domains: Sequence[tuple[str, int | None, int, bool]],
    work: float,
    measured: bool = True,
    sensor: bool = True,
    rails: Sequence[str] = ("POM_5V_IN", "POM_5V_CPU"),
    board: str = "n-1",
    seed: int = 0,
) -> dict[str, Any]:
    rng = random.Random(f"{seed} {key} {work}")
    hz = (domains and domains[0][1]) or 1_000_000_000
    latency = (work / hz + 0.0015) * rng.uniform(0.99, 1.01)
    volt = 0.9 + 0.2 * max(0.0, (hz - 1e9) / 0.5e9)
    others = sum(0.4 * ((other or 0) / 1e9) for _, other, _, _ in domains[1:])
    dynamic = 2.4e-9 * volt**2 * hz + others
    power = (1.7 + dynamic) * rng.uniform(0.99, 1.01)
    share = 0.008 if measured else 0.06
    usual = sensor or None
    return {
        "key": key,
        "domains": [{"name": n, "freq_hz": f, "units": u, "held": h} for n, f, u, h in domains],
        "measured": measured,
        "predicted": not measured,
        "latency_s": estimate(latency, share),
        "latency_p95_s": latency * 1.04 if measured else None,
        "power_w": usual and estimate(power, share),
        "rail_power_w": dict.fromkeys(rails, 0.0) | {rails[0]: power, rails[1]: dynamic}
        if sensor and measured and rails
        else {},
        "energy_j": usual and estimate(power * latency, share * 1.4),
        "energy_above_idle_j": usual and (estimate(dynamic * latency, share * 1.7) if measured else None),
        "metrics": {},
        "temperature_c": 41.5 + 3 * dynamic if measured else None,
        "throttled": False,
        "invalid": "",
        "idle_power_w": usual and estimate(1.7, share),
        "wall_power_w": None,
        "period": None,
        "inferences_per_joule": usual and 1 / (power * latency),
        "on_front": False,
        "visits": 1 if measured else 0,
        "board": board if measured else "",
    }


def series(rows: list[dict[str, Any]], variant: str = "tuned", batch: int = 1) -> dict[str, Any]:
    good = [r for r in rows if not r["throttled"] and not r["invalid"]]
    front, least = [], math.inf
    for each in sorted(good, key=lambda r: r["latency_s"]["value"]):
        if each["measured"] and each["energy_j"] and each["energy_j"]["value"] < least:
            least = each["energy_j"]["value"]
            each["on_front"] = True
            front.append(each["key"])
    measured = [r for r in good if r["measured"]]
    cost = "energy_j" if measured[0]["energy_j"] else "latency_s"
    ranked = sorted(measured, key=lambda r: r[cost]["value"])
    best, fastest = ranked[0], min(measured, key=lambda r: r["latency_s"]["value"])

    def ratio(name: str) -> float | None:
        return best[name]["value"] / fastest[name]["value"] if best[name] else None

    rows[-1]["visits"] = 3
    return {
        "variant": variant,
        "batch": batch,
        "rows": rows,
        "front": front,
        "anchor": rows[-1]["key"],
        "drift": {"percent": 0.6, "corrected": True, "void": False, "text": "the anchor drifted by 0.6 %; corrected"},
        "pick": {
            "key": best["key"],
            "point": {"cpu_freq_hz": {d["name"]: d["freq_hz"] for d in best["domains"] if d["held"]}},
            "text": f"{best['key']} has the least energy per inference",
            "certainty": 0.93,
            "against_fastest": {"latency": ratio("latency_s"), "energy": ratio("energy_j")},
            "runners_up": [{"key": r["key"], "text": "needs more energy, within the interval"} for r in ranked[1:3]],
        },
        "no_pick": "",
        "unmeasured": [],
    }


def document(serieses: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    rows = [r for s in serieses for r in s["rows"]]
    return {
        "sweep": 3,
        "model": "squeezenet1.1",
        "state": "finished",
        "board": {"type": "jetson-nano", "names": ["n-1"], "simulated": True, "watts": "watts assumed"},
        "started_at": 1_700_000_000.0,
        "seconds": 212.0,
        "goal": {"objective": "energy", "deadline_s": None, "max_power_w": None, "period_s": None, "wall": False},
        "grid": {
            "points": len(serieses[0]["rows"]),
            "measured": sum(r["measured"] for r in rows) // len(serieses),
            "merged": [],
        },
        "series": serieses,
        "metrics": {},
        "notes": ["the fan was held at 80 of 255"],
        "environment": {"farm": "0.1.0", "agent": "0.1.0", "tvm": "0.27.0"},
    } | changes


def nano(sensor: bool = True, every: int = 1, variants: Sequence[str] = ("untuned", "tuned")) -> dict[str, Any]:
    """A sweep over the CPU clocks of a Nano; of `every` points the first is measured, the others are predicted."""
    work = {"untuned": 98e6, "tuned": 41e6}
    made = []
    for variant in variants:
        rows = [
            row(
                f"a57={hz / 1e6:.9g}MHz",
                [("a57", hz, 4, True), ("gpu", 921_600_000, 1, False), ("memory", 1_600_000_000, 1, False)],
                work[variant],
                measured=i % every == 0 or i == len(NANO_HZ) - 1,
                sensor=sensor,
            )
            for i, hz in enumerate(NANO_HZ)
        ]
        made.append(series(rows, variant))
    merge = {
        "kept": "a57=1479MHz",
        "dropped": ["mode=MAXN a57=1479MHz"],
        "reason": "power modes MAXN differ in nothing that these clocks leave open",
    }
    result = document(made)
    result["grid"]["merged"] = [merge]
    return result


def tx2() -> dict[str, Any]:
    """A sweep over A57, Denver and GPU clocks of a TX2: a few points measured, the rest predicted."""
    rows = []
    index = 0
    for a57 in TX2_HZ:
        for denver in (None, *TX2_HZ[::2]):
            for gpu in TX2_GPU_HZ:
                cores = "0,3-5" if denver is None else "0-5"
                words = [f"cores={cores}", f"a57={a57 / 1e6:.9g}MHz"]
                words += [f"denver={denver / 1e6:.9g}MHz"] if denver else []
                key = " ".join([*words, f"gpu={gpu / 1e6:.9g}MHz"])
                domains = [
                    ("a57", a57, 4, True),
                    ("denver", denver, 2 if denver else 0, denver is not None),
                    ("gpu", gpu, 1, True),
                    ("memory", 1_866_000_000, 1, False),
                ]
                rails = ("VDD_IN", "VDD_SYS_CPU", "VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_SYS_DDR", "VDD_4V0_WIFI")
                measured = index % 7 == 0
                rows.append(row(key, domains, 55e6, measured, rails=rails, board="tx2-1", seed=index))
                index += 1
    rows[14] |= {"throttled": True, "invalid": "throttled: the board lowered a57 to 806.4 MHz", "temperature_c": 96.0}
    made = series(rows)
    return document(
        [made],
        model="mobilenet_v2",
        board={"type": "jetson-tx2", "names": ["tx2-1", "tx2-2"], "simulated": False, "watts": ""},
    )


def local() -> dict[str, Any]:
    made = [
        series([row("default", [], work, sensor=False)], variant)
        for variant, work in (("untuned", 9e6), ("tuned", 4e6))
    ]
    goal = {"objective": "latency", "deadline_s": None, "max_power_w": None, "period_s": None, "wall": False}
    notes = ["this machine has no clocks to pin", "no power sensor: latency only"]
    return document(
        made, goal=goal, notes=notes, board={"type": "local", "names": ["local"], "simulated": False, "watts": ""}
    )


def chosen_point(board_type: str, domains: Mapping[str, Any] | None = None, **point: Any) -> Chosen:
    """A measured point of a document on `board_type`; `domains`: name -> (Hz, units, held)."""
    clocks = [(name, *rest) for name, rest in (domains or {}).items()]
    made = row("the point", clocks, 4e7)
    made["point"] = OperatingPoint(**point).to_dict()
    whole = document([series([made])], board={"type": board_type, "names": ["b-1"], "simulated": False, "watts": ""})
    return export.choose_point(whole, whole["series"][0])
