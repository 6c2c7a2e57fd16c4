"""Judge what `farm model bench` measures against a baseline: conditions such as `latency > 5 %`, by intervals at 95 %.

The baseline is a file that names artifacts in a folder beside it; they are timed again, in turns with the candidate.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from device_agent.protocol import ProtocolError, load_json
from device_agent.protocol.hardware import Name
from farm.artifacts.artifact_folder import Artifact, new_file, open_artifact, to_name, write_artifact
from farm.artifacts.bench import BASELINE, OURS, Subject
from farm.artifacts.manifest import Manifest, Moment, Seconds, Sha256, Verified
from farm.artifacts.timing import ROUNDS, Timed
from farm.errors import PermanentError, UsageError
from farm.evaluation.evaluate import Scorer
from farm.evaluation.scores import Interval
from farm.inventory.documents import StrictModel, check_document
from farm.measure import statistics
from farm.selection import tie

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_ENERGIES = {"J": 1.0, "mJ": 1e-3, "uJ": 1e-6, "µJ": 1e-6}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "KiB": 1024.0, "MiB": 1024.0**2, "GB": 1e9, "GiB": 1024.0**3}
# The metrics, and the units of their absolute limits; each takes a change in percent, too.
SCORES = ("top1", "top5", "map50", "map")
UNITS = {"latency": _TIMES, "p90": _TIMES, "p99": _TIMES, "energy": _ENERGIES, "size": _BYTES, "memory": _BYTES}
_CONDITION = re.compile(r"\s*([a-z0-9]+)\s*([<>])\s*([+-]?)([0-9]{1,7}(?:\.[0-9]+)?)\s*([^\s0-9]{1,3})\s*")
EXAMPLES = (
    'Examples: "latency > 5 %", "p99 > 40 ms", "top1 < -0.5 %" (points below the baseline\'s), "top1 < 70 %". Known: '
    + ", ".join((*UNITS, *SCORES))
    + "."
)
_TIMED = ("latency", "p90", "p99", "energy")
_QUANTILES = {"p90": 0.9, "p99": 0.99}
_HINT = "`farm gate MODEL --boards TYPE --baseline FILE --write-baseline` makes one."
# A figure and both ends of its interval, equal where it is exact.


@dataclasses.dataclass(frozen=True)
class Condition:
    """A failure condition: `metric` above `limit`, a change (0.05: 5 % above the baseline) or a value in SI units.

    A score is below it: a share, or a change in shares (-0.005: half a point below the baseline).
    """

    condition: str
    metric: str
    is_change: bool
    limit: float


def read_conditions(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Read each condition once, in order. Raises UsageError."""
    return tuple(dict.fromkeys(_read_condition(text) for text in texts))


def _read_condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(f"--fail-if {text[:80]!r} is no condition", EXAMPLES)
    metric, sign, number, unit = found[1], found[3], float(found[4]), found[5]
    if metric in SCORES:
        if found[2] != "<" or unit != "%":
            raise UsageError(f"--fail-if: {metric} is bounded below, in %", EXAMPLES)
        limit = number / (-100 if sign == "-" else 100)
        return Condition(f"{metric} < {sign}{number:g} %", metric, bool(sign), limit)
    if metric in UNITS and (found[2] != ">" or sign):
        raise UsageError(f"--fail-if: {metric} is bounded above", EXAMPLES)
    if metric not in UNITS:
        raise UsageError(f"--fail-if: nothing is known of {metric!r}", EXAMPLES)
    if unit != "%" and unit not in UNITS[metric]:
        raise UsageError(f"--fail-if: {metric} is not given in {unit!r}", f"Known: %, {', '.join(UNITS[metric])}.")
    limit = number / 100 if unit == "%" else number * UNITS[metric][unit]
    return Condition(f"{metric} > {number:g} {unit}", metric, unit == "%", limit)


def judge(
    subject: Subject,
    verified: Verified,
    benched: Mapping[str, Any],
    timed: Timed,
    conditions: Sequence[Condition],
    scorer: Scorer | None = None,
) -> dict[str, Any]:
    """Judge a candidate by `bench`'s document and its scores; return this board's part of the gate's document.

    Wrong outputs fail at any speed. A figure that the board has no sensor for is undecided, and one of a run whose
    latencies are doubtful.
    """
    [model], board, artifacts = benched["models"], benched["board"], subject.list_artifacts()
    doubt = model.get("doubt", "")
    judged = [_judge(each, artifacts, timed, scorer) for each in conditions] if verified.matches else []
    judged = [dismiss(each) for each in judged] if doubt else judged
    verdict = find_worst([each["verdict"] for each in judged]) if verified.matches else FAIL
    part = {"model": model["model"], "board": board["name"], "board_type": board["type"]}
    part |= {"simulated": board["simulated"], "device": subject.device, "verdict": verdict}
    part |= {"verified": verified.model_dump(mode="json")}
    part |= {key: benched[key] for key in ("operating_point", "threads", "clocks")} | {"doubt": doubt}
    part |= {"rounds": len(timed.rounds), "conditions": judged, "candidate": None, "baseline": None}
    for key, name in (("candidate", OURS), ("baseline", BASELINE)):
        if name in artifacts:
            about = artifacts[name].manifest
            facts = {"library_sha256": about.library.sha256, "memory_bytes": about.memory_bytes}
            part[key] = {**model["variants"][name], "artifact": str(artifacts[name].folder), **facts}
    return part


def dismiss(judged: Mapping[str, Any]) -> dict[str, Any]:
    """Return a judgement from a run whose latencies are doubtful: what was timed decides nothing."""
    return {**judged, "verdict": UNDECIDED} if judged["metric"] in _TIMED else dict(judged)


def find_worst(verdicts: Sequence[str]) -> str:
    """Combine verdicts; without any it passes."""
    return next((each for each in (FAIL, UNDECIDED) if each in verdicts), PASS)


def _judge(
    condition: Condition, artifacts: Mapping[str, Artifact], timed: Timed, scorer: Scorer | None
) -> dict[str, Any]:
    verdict, metric, limit = UNDECIDED, condition.metric, condition.limit
    found: Interval | None = None
    if metric in SCORES:
        found = _find_score(condition, artifacts, scorer) if scorer is not None else None
        if found is not None:
            verdict = FAIL if found[2] < limit else PASS if found[1] >= limit else UNDECIDED
    else:
        found = (_find_change if condition.is_change else _find_figure)(metric, artifacts, timed)
        limit += condition.is_change
        if found is not None:
            verdict = FAIL if found[1] > limit else PASS if found[2] <= limit else UNDECIDED
    shown = dict(zip(("value", "low", "high"), found or (None, None, None), strict=True))
    return {**dataclasses.asdict(condition), **shown, "verdict": verdict}


def _find_score(condition: Condition, artifacts: Mapping[str, Artifact], scorer: Scorer) -> Interval | None:
    if not condition.is_change:
        return scorer.find(OURS, condition.metric)
    return scorer.find_change(OURS, BASELINE, condition.metric) if BASELINE in artifacts else None


def _find_change(metric: str, artifacts: Mapping[str, Artifact], timed: Timed) -> Interval | None:
    """Divide the candidate's by the baseline's."""
    if BASELINE not in artifacts:
        return None
    if metric == "latency":  # within rounds, so that common effects of the board cancel
        rounds = [tie.Round(number, "", each) for number, each in sorted(timed.rounds.items())]
        [ratio] = tie.compare(rounds, BASELINE, [OURS], tie.TieRule(looks=(ROUNDS,)))
        return ratio.value, ratio.low, ratio.high
    ours, theirs = (_find_figure(metric, artifacts, timed, name) for name in (OURS, BASELINE))
    if ours is None or theirs is None or not theirs[1] > 0:
        return None
    # Both intervals at their ends: wider than necessary, so undecided rather than wrong.
    return ours[0] / theirs[0], ours[1] / theirs[2], ours[2] / theirs[1]


def _find_figure(metric: str, artifacts: Mapping[str, Artifact], timed: Timed, name: str = OURS) -> Interval | None:
    summary, energy, about = timed.summary(name), timed.outcomes[name].energy, artifacts[name].manifest
    if metric == "latency":
        return (summary.median, summary.ci_low, summary.ci_high) if summary else None
    if metric in _QUANTILES:
        share = _QUANTILES[metric]
        return float(np.quantile(timed.samples[name], share)), *statistics.bound_quantile(timed.samples[name], share)
    if metric == "energy":
        if energy is None or energy.per_call_j is None or energy.per_call_ci_j is None:
            return None
        return energy.per_call_j, *energy.per_call_ci_j
    size = float(about.memory_bytes if metric == "memory" else about.library.bytes)
    return size, size, size


class BaselineEntry(StrictModel):
    """One model on one board type. `latency_s` is its median when the baseline was made, for people alone."""

    model: str
    board_type: Name
    simulated: bool
    device: str
    operating_point: str
    artifact: str
    library_sha256: Sha256
    latency_s: Seconds
    created_at: Moment

    @property
    def key(self) -> tuple[str, str, bool, str, str]:
        return self.model, self.board_type, self.simulated, self.device, self.operating_point


class Baseline(StrictModel):
    """The whole file."""

    format: Literal["tvm-farm baseline"] = "tvm-farm baseline"
    version: Literal[1] = 1
    entries: tuple[BaselineEntry, ...] = ()


def read_baseline(path: Path) -> Baseline:
    """Read the file. Raises UsageError."""
    try:
        return check_document(load_json(path.read_text(encoding="utf-8")), Baseline, path)
    except FileNotFoundError as error:
        raise UsageError(f"there is no baseline {path}", _HINT) from error
    except (OSError, UnicodeDecodeError, ProtocolError) as error:
        raise UsageError(f"{path} is no baseline: {error}", _HINT) from error


def open_entry(path: Path, baseline: Baseline, about: Manifest, point: str) -> Artifact:
    """Open the baseline's artifact for a candidate.

    Raises UsageError where the baseline has none for it, PermanentError where its contents have changed.
    """
    key = (about.name, about.board_type, about.simulated, about.device, point)
    entry = next((each for each in baseline.entries if each.key == key), None)
    if entry is None:
        wanted = f"{about.name} on {about.board_type}{' (simulated)' * about.simulated}, {about.device}, at {point}"
        known = "; ".join(f"{each.model} on {each.board_type}" for each in baseline.entries) or "nothing"
        raise UsageError(f"{path} says nothing of {wanted}", f"It has {known}. {_HINT}")
    folder = (path.parent / entry.artifact).resolve()
    if not folder.is_relative_to(path.parent.resolve()):
        raise UsageError(f"{path}: {entry.artifact!r} leads out of the baseline's folder")
    artifact = open_artifact(folder)
    artifact.require_whole()
    if artifact.manifest.library.sha256 != entry.library_sha256:
        raise PermanentError(f"{folder} is not the artifact that {path} was made with", "Make the baseline anew.")
    return artifact


def keep_baseline(path: Path, artifact: Artifact, point: str, latency_s: float) -> None:
    """Replace the baseline of this model, board type, device and point; the file's other entries stay."""
    about = artifact.manifest
    word = "" if point == "default" else re.sub(r"\W", "-", point)
    name = to_name(about.name, f"{about.board_type}-{about.device}{'-simulated' * about.simulated}", word)
    place = Path(f"{path.stem}.artifacts") / name
    write_artifact(path.parent / place, about, {each: artifact.read_file(each) for each in about.files})
    facts: dict[str, Any] = {each: getattr(about, each) for each in ("board_type", "simulated", "device")}
    facts |= {"model": about.name, "operating_point": point, "artifact": str(place), "created_at": time.time()}
    entry = BaselineEntry(**facts, library_sha256=about.library.sha256, latency_s=latency_s)
    others = read_baseline(path).entries if path.exists() else ()
    kept = Baseline(entries=(*(each for each in others if each.key != entry.key), entry))
    with new_file(path) as partial:
        partial.write_text(kept.model_dump_json(indent=2) + "\n")
