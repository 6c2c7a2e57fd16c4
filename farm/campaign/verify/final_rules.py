"""What a model's final decides: which mixes of records take part, which contender is taken, and what the trials gained.

Pure. "Faster" means what it means for winners (`tie`): an interval over rounds in turns that leaves no room for the
other. Where functions can be watched while the model runs, what they took there says which records to leave out;
elsewhere groups of functions are left out in turn. Either way the model as a whole has the last word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from farm.artifacts.contenders import PREDICTED, RECORDED, RecordPart
from farm.artifacts.timing import ROUNDS
from farm.selection import tie
from farm.selection.looks import LEAST_ROUNDS
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
