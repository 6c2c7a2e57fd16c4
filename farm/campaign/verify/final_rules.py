"""The rules of a model's final (an end-to-end A/B test): mixes of records, choice of the contender, the reported gain.

Pure. "Faster" means as in `tie`: the interval over interleaved rounds excludes equality. Where functions can be timed
within the model, those times say which records to leave out; elsewhere groups of functions are left out in turn. The
end-to-end time decides.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from farm.artifacts.contenders import PREDICTED, RECORDED, BuiltContenders, RecordPart
from farm.artifacts.timing import ROUNDS, Timed, describe_runs
from farm.artifacts.verify import OutputComparison
from farm.points.values import Objective
from farm.selection import tie
from farm.selection.rounds import LEAST_ROUNDS
from farm.selection.tie import Ratio, Round, TieRule
from farm.types.campaigns import TypeOrder
from farm.units import joule_scale

# Models are compared after the rounds of any model timing, and if undecided, after as many more.
RULE = TieRule(looks=(ROUNDS, 2 * ROUNDS))
# Groups of functions, each left out once: three make six programs, timed in turns.
_MOST_GROUPS = 3
# The limit for compiling mixes: the biggest models take a minute each, and are decided as a whole.
_MIX_S = 30.0
MIXED = "mixed"
# TVM's suffix of a function whose weights are packed in advance.
_PACKED = "_prepacked"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The chosen contender, and the gain: how much longer the prediction takes, with an interval; None where the
    prediction is chosen or was not timed. `ratios` are all others' to the fastest.
    """

    taken: str
    gain: Ratio | None
    leader: str
    ratios: tuple[Ratio, ...]


def plan_mixes(parts: Sequence[RecordPart], seconds: float) -> dict[str, dict[str, str]]:
    """Plan mixes by name: each leaves out the records of one group of functions whose code differs.

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
    """Plan no mixes: they follow once functions were timed within the model (`mix_in_place`)."""
    del parts, seconds
    return {}


def compare_in_place(parts: Sequence[RecordPart], rounds: Mapping[str, Sequence[Round]]) -> dict[str, Ratio]:
    """Return, by workload, how much longer its record takes within the model than the prediction (below 1: it gains).

    `rounds` hold the times of functions in both programs, by TVM's name of the function.
    """
    found = {}
    for part in parts:
        seen = rounds.get(part.function, ())
        if part.differs and len(tie.complete(seen, (PREDICTED, RECORDED))) >= LEAST_ROUNDS:
            (found[part.workload],) = tie.compare(seen, PREDICTED, [RECORDED], RULE)
    return found


def mix_in_place(parts: Sequence[RecordPart], ratios: Mapping[str, Ratio], seconds: float) -> dict[str, dict[str, str]]:
    """Plan the records to leave out, by the name of a mix: all without a proven gain within the model; those with a
    proven loss.

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
    """Return the candidates of all parts with a record, by workload."""
    return {part.workload: part.candidate for part in parts if part.candidate is not None}


def join_mixes(rounds: Sequence[Round], mixes: Mapping[str, Mapping[str, str]]) -> dict[str, str] | None:
    """Combine the mixes that are faster than all records together; None where that is no new program."""
    losing = [ratio.candidate for ratio in tie.compare(rounds, RECORDED, list(mixes), RULE) if ratio.high < 1.0]
    if not 2 <= len(losing) < len(mixes):  # all of them: that is the prediction
        return None
    return {workload: candidate for name in losing for workload, candidate in mixes[name].items()}


def decide(rounds: Sequence[Round], names: Collection[str], *, last: bool) -> Verdict | None:
    """Choose the fastest contender; the prediction is replaced only by one that is proven faster.

    None while more rounds may decide. A tie keeps the prediction, which needs no trials.
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


def list_rounds(timed: Timed, by: Objective = Objective.LATENCY) -> list[Round]:
    """Return the rounds for judging, those of one board; with another objective, its values instead of latencies."""
    if by is Objective.LATENCY:
        return [Round(number, "", medians) for number, medians in sorted(timed.rounds.items())]
    found: dict[int, dict[str, float]] = {}
    energies = timed.above_idle if by is Objective.PERIOD else timed.energies
    for (number, name), energy_j in sorted(energies.items()):
        found.setdefault(number, {})[name] = by.of(timed.rounds[number][name], None, energy_j)
    return [Round(number, "", costs) for number, costs in found.items()]


def list_layer_rounds(timed: Timed) -> dict[str, list[Round]]:
    """Return the times of functions in each round by TVM's name, without its suffix for packed weights."""
    found: dict[str, list[Round]] = {}
    both = (timed.details.get(name, []) for name in (RECORDED, PREDICTED))
    for number, (recorded, predicted) in enumerate(zip(*both, strict=False)):
        seen = {layer.name.removesuffix(_PACKED): layer.latency_s for layer in predicted.layers}
        for layer in recorded.layers:
            name = layer.name.removesuffix(_PACKED)
            if min(layer.latency_s, seen.get(name, 0.0)) > 0:
                latencies = {RECORDED: layer.latency_s, PREDICTED: seen[name]}
                found.setdefault(name, []).append(Round(number, "", latencies))
    return found


def drop_late(timed: Timed, names: Sequence[str], deadline_s: float | None) -> list[str]:
    """Leave out contenders beyond the deadline; all stay where none keeps it."""
    if deadline_s is None:
        return list(names)
    return [name for name in names if statistics.median(timed.samples[name]) <= deadline_s] or list(names)


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
    by: Objective = Objective.LATENCY,
) -> dict[str, Any]:
    """Build the document. `whole` timed the rivals too, `timed` decided; `refused` is left out from now on. `sizes` are
    the programs', in bytes.
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
        "objective": str(by),
        "energy_j": {name: statistics.median(each) for name, each in _list_energies(timed).items()},
        "said": _say(verdict, against, len(differing), len(left_out))
        if by is Objective.LATENCY
        else _say_by(by, verdict, len(left_out), _list_energies(timed)[verdict.taken]),
    }


def describe_in_place(parts: Sequence[RecordPart], ratios: Mapping[str, Ratio]) -> list[dict[str, Any]]:
    """List functions whose record differs from the prediction, with their relative time within the model."""
    return [
        {"workload": part.workload, "name": part.name, **_to_dict(ratios[part.workload])}
        for part in parts
        if part.workload in ratios
    ]


def _describe_cost(timed: Timed, name: str) -> dict[str, Any]:
    found = timed.describe_details(name)
    return {key: found[key] for key in ("first_s", "peak_memory_bytes")}


def describe_none(key: Mapping[str, str], of_type: TypeOrder, reason: str) -> dict[str, Any]:
    """Build the document of a final that could not take place."""
    said = f"not timed as a whole: {reason}; it is compiled from its records"
    return {**key, "simulated": of_type.simulated, "taken": None, "latency_s": None, "gain": None, "said": said}


def _say(verdict: Verdict, against: Ratio | None, differing: int, left_out: int) -> str:
    if verdict.gain is not None:
        said = f"{verdict.gain.value:.2f} times as fast as the untuned prediction"
        if verdict.taken == RECORDED:
            return said
        return f"{said}, without {left_out} of {differing} records, which are slower within the model"
    if not differing:
        return "no schedule is known that is better than the predicted ones"
    if against is None:
        return "tuning found no speedup: only the predicted schedules compute the right output"
    if against.is_slower:
        return (
            f"tuning found no speedup: with its records the model takes {against.value:.2f} times as long as with the "
            "predicted schedules; those were compiled"
        )
    return "tuning found no measurable speedup over the predicted schedules; those were compiled"


def _list_energies(timed: Timed) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for (_, name), energy_j in timed.energies.items():
        found.setdefault(name, []).append(energy_j)
    return found


def _say_by(by: Objective, verdict: Verdict, left_out: int, energies_j: Sequence[float]) -> str:
    energy_j = statistics.median(energies_j)
    used = f"{joule_scale((energy_j,)).text(energy_j)} an inference"
    if verdict.gain is None:
        return f"{used}: tuning found nothing better by {by} than {verdict.taken}, which was compiled"
    without = f", without {left_out} records" if left_out else ""
    return f"{used}{without}: the untuned prediction has {verdict.gain.value:.2f} times its {by}"


def _to_dict(ratio: Ratio) -> dict[str, float]:
    return {"value": ratio.value, "low": ratio.low, "high": ratio.high}


def _to_plain(found: OutputComparison) -> dict[str, Any]:
    """Return an error's size, None where it is infinite or not a number: JSON has neither."""
    values = dataclasses.asdict(found)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
