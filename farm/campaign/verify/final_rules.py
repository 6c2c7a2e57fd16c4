"""What a model's final decides: which mixes of records take part, which contender is taken, and what the trials gained.

Pure. "Faster" means what it means for winners (`tie`): an interval over rounds in turns that leaves no room for the
other. Where functions can be watched while the model runs, what they took there says which records to leave out;
elsewhere groups of functions are left out in turn. Either way the model as a whole has the last word.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from farm.artifacts.contenders import PREDICTED, RECORDED, BuiltContenders, RecordPart
from farm.artifacts.timing import ROUNDS, Timed, describe_runs
from farm.artifacts.verify import OutputComparison
from farm.campaign.order import TypeOrder
from farm.selection import tie
from farm.selection.rounds import LEAST_ROUNDS
from farm.selection.tie import Ratio, Round, TieRule

# Models are compared after the rounds that any timing of models has, and where that does not tell, after as many more.
RULE = TieRule(looks=(ROUNDS, 2 * ROUNDS))
# Groups of functions of which each is left out once: with three, six programs in all, each timed in turns.
_MOST_GROUPS = 3
# What compiling mixes may take: the biggest models take a minute each, and are decided as a whole.
_MIX_S = 30.0
MIXED = "mixed"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The contender that is taken, and how much longer the prediction takes, with an interval; None where that is what
    is taken, or was not timed. `ratios` are all others' to what leads.
    """

    taken: str
    gain: Ratio | None
    leader: str
    ratios: tuple[Ratio, ...]


def plan_mixes(parts: Sequence[RecordPart], seconds: float) -> dict[str, dict[str, str]]:
    """The records to leave out, by the name of a mix: each leaves out one group of functions whose code differs.

    The heaviest functions go to different groups. A mix takes `seconds` to compile. None where there is nothing to mix.
    """
    differing = sorted((part for part in parts if part.differs), key=lambda part: (-part.seconds, part.workload))
    count = min(_MOST_GROUPS, len(differing), int(_MIX_S / seconds) if seconds > 0 else _MOST_GROUPS)
    if count < 2:
        return {}
    groups: list[list[RecordPart]] = [[] for _ in range(count)]
    for part in differing:
        min(groups, key=lambda group: (sum(each.seconds for each in group), len(group))).append(part)
    return {f"{MIXED} {number}": refuse(group) for number, group in enumerate(groups, 1) if group}


def plan_later(parts: Sequence[RecordPart], seconds: float) -> dict[str, dict[str, str]]:
    """No mixes: they are planned once functions were seen within the model (`mix_in_place`)."""
    del parts, seconds
    return {}


def compare_in_place(parts: Sequence[RecordPart], rounds: Mapping[str, Sequence[Round]]) -> dict[str, Ratio]:
    """By workload, how much longer its record takes within the model than what is predicted (below 1: it gains).

    `rounds` have what functions took in the programs as recorded and as predicted, by TVM's name of the function.
    """
    found = {}
    for part in parts:
        seen = rounds.get(part.function, ())
        if part.differs and len(tie.complete(seen, (PREDICTED, RECORDED))) >= LEAST_ROUNDS:
            (found[part.workload],) = tie.compare(seen, PREDICTED, [RECORDED], RULE)
    return found


def mix_in_place(parts: Sequence[RecordPart], ratios: Mapping[str, Ratio], seconds: float) -> dict[str, dict[str, str]]:
    """The records to leave out, by the name of a mix: all that do not surely gain within the model; those that surely
    lose there.

    A mix takes `seconds` to compile: where both would take too long, it is the first. None where that leaves all
    records, or none.
    """
    differing = [part for part in parts if part.differs]
    gaining = {name for name, ratio in ratios.items() if ratio.high < 1.0}
    losing = {name for name, ratio in ratios.items() if ratio.is_slower}
    kept = [[part for part in differing if part.workload in gaining]]
    kept.append([part for part in differing if part.workload not in losing])
    mixes: list[dict[str, str]] = []
    for each in kept:
        refused = refuse([part for part in differing if part not in each])
        if each and refused and refused not in mixes:
            mixes.append(refused)
    most = max(1, int(_MIX_S / seconds)) if seconds > 0 else len(mixes)
    return {f"{MIXED} {number}": refused for number, refused in enumerate(mixes[:most], 1)}


def refuse(parts: Collection[RecordPart]) -> dict[str, str]:
    """The candidates of all of these that have a record, by workload."""
    return {part.workload: part.candidate for part in parts if part.candidate is not None}


def join_mixes(rounds: Sequence[Round], mixes: Mapping[str, Mapping[str, str]]) -> dict[str, str] | None:
    """What is left out by all mixes that are faster than all records together; None where that is no other program."""
    losing = [ratio.candidate for ratio in tie.compare(rounds, RECORDED, list(mixes), RULE) if ratio.high < 1.0]
    if not 2 <= len(losing) < len(mixes):  # all of them: that is the prediction
        return None
    return {workload: candidate for name in losing for workload, candidate in mixes[name].items()}


def decide(rounds: Sequence[Round], names: Collection[str], *, last: bool) -> Verdict | None:
    """Which of these is taken: the fastest, but the prediction unless it is surely slower than that.

    None while more rounds may tell. What nobody had to try for is at least not worse than what was tried, so it is what
    is kept where the two cannot be told apart.
    """
    judged = tie.judge(rounds, names, RULE, last=last)
    ratios = {ratio.candidate: ratio for ratio in judged.ratios}
    if PREDICTED not in names:
        return Verdict(judged.leader, None, judged.leader, judged.ratios)
    if judged.leader != PREDICTED and ratios[PREDICTED].is_slower:
        return Verdict(judged.leader, ratios[PREDICTED], judged.leader, judged.ratios)
    if judged.open and (judged.leader == PREDICTED or PREDICTED in judged.open):
        return None
    return Verdict(PREDICTED, None, judged.leader, judged.ratios)


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
