"""A model's final as one plain document: what was timed, what is taken, and in a sentence what the trials gained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from farm.artifacts.contenders import PREDICTED, RECORDED, BuiltContenders, RecordPart
from farm.artifacts.timing import Timed, describe_runs
from farm.artifacts.verify import OutputComparison
from farm.campaign.order import TypeOrder
from farm.campaign.verify.final_rules import RULE, Verdict
from farm.selection import tie
from farm.selection.tie import Ratio, Round


def describe(
    key: Mapping[str, str],
    of_type: TypeOrder,
    built: BuiltContenders,
    whole: Timed,
    timed: Timed,
    verdict: Verdict,
    refused: Mapping[str, str],
    rounds: Sequence[Round],
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """The document. `whole` timed the rivals too, `timed` what was decided by; `refused` is left out from now on.
    `sizes` are the programs', in bytes.
    """
    samples = {**whole.samples, **timed.samples}
    both = Timed(
        samples,
        details={**whole.details, **timed.details},
        other_loads=whole.other_loads + timed.other_loads,
        loads_1min=whole.loads_1min + timed.loads_1min,
    )
    names = [name for name in samples if name not in timed.missing]
    summaries = {name: summary for name in names if (summary := both.summary(name)) is not None}
    against = None
    if {RECORDED, PREDICTED} <= timed.samples.keys():
        (against,) = tie.compare(rounds, PREDICTED, [RECORDED], RULE)
    differing = [part for part in built.parts if part.differs]
    left_out = [part.name for part in built.parts if part.workload in refused]
    return {
        **key,
        "simulated": of_type.simulated,
        "taken": verdict.taken,
        "variants": {
            name: {**dataclasses.asdict(summary), **_describe_cost(both, name), "bytes": sizes[name]}
            for name, summary in summaries.items()
        },
        "latency_s": summaries[verdict.taken].median,
        "gain": None if verdict.gain is None else _to_dict(verdict.gain),
        "recorded_to_predicted": None if against is None else _to_dict(against),
        "workloads": len(built.parts),
        "recorded": sum(part.candidate is not None for part in built.parts),
        "differing": len(differing),
        "left_out": left_out,
        "runs": describe_runs(max((len(each) for each in timed.samples.values()), default=0), len(rounds)),
        "missing": {**whole.missing, **timed.missing},
        "compared": {name: _to_plain(each) for name, each in {**whole.compared, **timed.compared}.items()},
        "doubt": both.find_doubt(),
        "said": _say(verdict, against, len(differing), len(left_out)),
    }


def describe_in_place(parts: Sequence[RecordPart], ratios: Mapping[str, Ratio]) -> list[dict[str, Any]]:
    """Each function whose record is other code than the prediction, and how much longer it takes within the model."""
    return [
        {"workload": part.workload, "name": part.name, **_to_dict(ratios[part.workload])}
        for part in parts
        if part.workload in ratios
    ]


def _describe_cost(timed: Timed, name: str) -> dict[str, Any]:
    found = timed.describe_details(name)
    return {key: found[key] for key in ("first_s", "peak_memory_bytes")}


def describe_none(key: Mapping[str, str], of_type: TypeOrder, reason: str) -> dict[str, Any]:
    """The document of a final that could not be held."""
    said = f"not timed as a whole: {reason}; it is compiled from its records"
    return {**key, "simulated": of_type.simulated, "taken": None, "latency_s": None, "gain": None, "said": said}


def _say(verdict: Verdict, against: Ratio | None, differing: int, left_out: int) -> str:
    if verdict.gain is not None:
        said = f"{verdict.gain.value:.2f} times as fast as without a trial"
        if verdict.taken == RECORDED:
            return said
        return f"{said}, without {left_out} of {differing} records, which are slower within the model"
    if not differing:
        return "the trials gained nothing: they found the schedules that were predicted"
    if against is None:
        return "the trials gained nothing: only what was predicted does what it should"
    if against.is_slower:
        return (
            f"the trials gained nothing: with its records it takes {against.value:.2f} times as long as by prediction, "
            "which is what is compiled"
        )
    return "the trials gained nothing that could be measured: the prediction is as fast, and is what is compiled"


def _to_dict(ratio: Ratio) -> dict[str, float]:
    return {"value": ratio.value, "low": ratio.low, "high": ratio.high}


def _to_plain(found: OutputComparison) -> dict[str, Any]:
    """JSON has no infinity: the error of an output that is not a number has no size."""
    values = dataclasses.asdict(found)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
