"""Warm starts: use trials of other tasks where they predict well, and stop when the task's own results disagree.

Other tasks are other shapes, operating points and board types. A cost model trained on some of their groups must rank
the held-out ones (Spearman's rank correlation); otherwise they are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from farm.search.tuners.cost_model import Features, Floats, Lesson, SampleGroup, Trees
from farm.search.tuners.decisions import ForeignTrial, Genome, distance
from farm.search.tuners.history import TaskHistory, with_traits
from farm.search.tuners.schedule_space import ScheduleSpace
from farm.values import Workload

# Below this a ranking is hardly better than chance. At it, the best tenth by prediction holds about three times as many
# of the true best tenth as a random tenth.
THRESHOLD = 0.35
# Foreign trials used per task (10-30 ms each, once), and held-out groups.
MOST_TRIALS = 256
_FOLDS = 4
# Smaller groups cannot judge a ranking.
_LEAST_JUDGED = 8
# Foreign schedules proposed first, of the same function and of other shapes; those within `_ALIKE` decisions of a
# faster one are redundant.
_FIRST_SAME, _FIRST_OTHER, _ALIKE = 8, 4, 2
# Own results that judge the foreign trials; the number of own results that halves their weight.
_LEAST_OWN, _HALF_WEIGHT = 16, 24


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The outcome of a warm start: how many foreign trials train the cost model, how many were left out, and why.

    `rank_correlation` is Spearman's on held-out groups, None for too few trials. `first` is the number of foreign
    schedules that are proposed first.
    """

    used: int
    left_out: int
    rank_correlation: float | None
    first: int
    reason: str

    def __str__(self) -> str:
        """Describe it in one line."""
        return f"the search begins with {self.used} trials of other tasks, {self.left_out} are left out: {self.reason}"


class ForeignSpaces:
    """Schedule spaces of other workloads and the features of trials in them, shared by a campaign's tasks."""

    def __init__(self, threads: int) -> None:
        """`threads` limits the extraction of features."""
        self._threads = threads
        self._spaces: dict[str, ScheduleSpace] = {}
        self._features: dict[tuple[str, str], Features | None] = {}

    def open(self, workload: Workload) -> ScheduleSpace:
        """Return the space of a workload, made once."""
        if workload.hash not in self._spaces:
            self._spaces[workload.hash] = ScheduleSpace(workload, self._threads)
        return self._spaces[workload.hash]

    def extract(self, trials: Sequence[ForeignTrial]) -> list[Features | None]:
        """Return the features of each trial with its board's traits; None where its trace no longer fits."""
        missing: dict[str, list[ForeignTrial]] = collections.defaultdict(list)
        for trial in trials:
            if (trial.workload.hash, trial.candidate) not in self._features:
                missing[trial.workload.hash].append(trial)
        for several in missing.values():
            space = self.open(several[0].workload)
            genomes = [space.read(trial.trace_json) for trial in several]
            found = iter(space.evaluate([(genome, 0) for genome in genomes if genome is not None]))
            for trial, genome in zip(several, genomes, strict=True):
                evaluated = None if genome is None else next(found)
                good = evaluated is not None and len(evaluated.features) > 0
                self._features[trial.workload.hash, trial.candidate] = (
                    evaluated.features if evaluated and good else None
                )
            space.release()
        answers = []
        for trial in trials:
            features = self._features[trial.workload.hash, trial.candidate]
            answers.append(None if features is None else with_traits(features, trial.traits))
        return answers


class Foreign:
    """The foreign trials of one task and their credibility."""

    def __init__(
        self, history: TaskHistory, trials: Sequence[ForeignTrial], spaces: ForeignSpaces, loss: str, seed: int
    ) -> None:
        """Evaluate the trials, judge them, and choose the schedules to try first."""
        self._loss, self._seed = loss, seed
        self._history = history
        chosen = choose(trials, MOST_TRIALS)
        groups: dict[tuple[str, str, str], list[ForeignTrial]] = collections.defaultdict(list)
        for trial in chosen:
            groups[trial.workload.hash, trial.board_type, trial.point].append(trial)
        self._sources, self._spaces = groups, spaces
        self._corrections: list[Lesson] | None = None
        self._same: list[bool] = []
        self._groups: list[SampleGroup] = []
        for several in groups.values():
            taught = [
                (features, trial.median_s)
                for features, trial in zip(spaces.extract(several), several, strict=True)
                if features is not None
            ]
            if taught:
                self._groups.append(SampleGroup([f for f, _ in taught], [s for _, s in taught]))
                self._same.append(spaces.open(several[0].workload).structure == history.space.structure)
        self._judged: dict[int, float] = {}
        self._trees: Trees | None = None
        self.first = _choose_first(history, groups, spaces)
        self.report = self._judge(len(trials))

    def lessons(self) -> list[SampleGroup]:
        """Return the foreign groups, weighted by how well they rank the task's results; none where they mislead."""
        if not self.report.used:
            return []
        own = len(self._history.results)
        trust = self.judge_by_own()
        if trust is not None and trust < THRESHOLD:
            return []
        weight = (1.0 if trust is None else trust) * _HALF_WEIGHT / (_HALF_WEIGHT + own)
        return [
            dataclasses.replace(group, weight=weight * (1.0 if same else 0.5))
            for group, same in zip(self._groups, self._same, strict=True)
        ]

    def list_corrections(self, board_type: str, mcpu: str | None) -> list[Lesson]:
        """Return lessons on predictions from trials on the task's own core."""
        if self._corrections is not None:
            return self._corrections
        self._corrections = []
        for (name, on, point), several in self._sources.items():
            space = self._spaces.open(several[0].workload)
            if on != board_type or several[0].workload.target.get("mcpu") != mcpu or space.plans is None:
                continue
            genomes = [(space.read(trial.trace_json), trial.median_s) for trial in several]
            rows = [(space.rows[genome], math.log2(s)) for genome, s in genomes if genome in space.rows]
            if rows:
                self._corrections.append(Lesson(f"{name}/{on}/{point}", space.plans, *zip(*rows, strict=True)))
        return self._corrections

    def judge_by_own(self) -> float | None:
        """Return the rank correlation of the foreign model with the task's results; None for too few.

        Judged again whenever the number of results doubles.
        """
        count = _LEAST_OWN
        while 2 * count <= len(self._history.results):
            count *= 2
        if count > len(self._history.results):
            return None
        if count not in self._judged:
            features, latencies = self._history.lessons()
            if self._trees is None:
                self._trees = Trees(self._groups, self._loss, self._seed, 1)
            known = min(count, len(features))
            self._judged[count] = spearman(self._trees.score(features[:known]), -np.array(latencies[:known]))
        return self._judged[count]

    def _judge(self, given: int) -> WarmStart:
        looked_at = sum(len(group.features) for group in self._groups)
        rank_correlation = cross_validate(self._groups, self._loss, self._seed)
        if looked_at == 0:
            used, reason = 0, "none of their schedules can be restored"
        elif rank_correlation is None:
            used, reason = 0, f"{looked_at} trials are too few to judge"
        elif rank_correlation < THRESHOLD:
            used, reason = 0, "a cost model trained on some of them ranks the others hardly better than chance"
        else:
            used, reason = looked_at, "a cost model trained on some of them ranks the others"
        if rank_correlation is not None:
            reason += f" (rank correlation {rank_correlation:.2f}, needed {THRESHOLD:g})"
        if self.first:
            reason += f"; {len(self.first)} of the best schedules elsewhere are tried first"
        return WarmStart(used, given - used, rank_correlation, len(self.first), reason)


def choose(trials: Sequence[ForeignTrial], most: int) -> list[ForeignTrial]:
    """Choose up to `most` trials, equally from each task: its fastest, and others spread evenly over its latencies."""
    groups: dict[tuple[str, str, str], list[ForeignTrial]] = collections.defaultdict(list)
    for trial in trials:
        groups[trial.workload.hash, trial.board_type, trial.point].append(trial)
    chosen = []
    left = most
    # The smallest first: larger ones get what they leave.
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[0]))
    for index, (_, several) in enumerate(ordered):
        share = min(len(several), left // (len(ordered) - index))
        ranked = sorted(several, key=lambda trial: (trial.median_s, trial.candidate))
        places = np.linspace(0, len(ranked) - 1, share).round().astype(int)
        chosen += [ranked[place] for place in places]
        left -= share
    return chosen


def cross_validate(groups: Sequence[SampleGroup], loss: str, seed: int) -> float | None:
    """Return the mean rank correlation on held-out groups, or halves of a single one; None where all are small."""
    large = sorted((g for g in groups if len(g.features) >= _LEAST_JUDGED), key=lambda g: -len(g.features))
    if not large:
        return None
    folds = []
    if len(groups) == 1:
        [group] = groups
        halves = [SampleGroup(group.features[part::2], group.latency_s[part::2]) for part in (0, 1)]
        folds = [(halves[:1], halves[1]), (halves[1:], halves[0])]
    else:
        folds = [([g for g in groups if g is not held], held) for held in large[:_FOLDS]]
    found = []
    for taught, held in folds:
        scores = Trees(taught, loss, seed, 1).score(held.features)
        found.append(spearman(scores, -np.array(held.latency_s)))
    return float(np.mean(found))


def _choose_first(
    history: TaskHistory, groups: Mapping[tuple[str, str, str], Sequence[ForeignTrial]], spaces: ForeignSpaces
) -> list[Genome]:
    """Return the best foreign schedules for this task: of the same function, then of the nearest shapes."""
    mine = history.space.workload.flop
    ranked = sorted(
        groups.values(),
        key=lambda several: (
            spaces.open(several[0].workload).structure != history.space.structure,
            abs(np.log((several[0].workload.flop + 1) / (mine + 1))),
        ),
    )
    same: dict[Genome, None] = {}
    other: dict[Genome, None] = {}
    found = []
    for several in ranked:
        equal = spaces.open(several[0].workload).structure == history.space.structure
        found.append((equal, _choose_unlike(history.space, several, _FIRST_SAME if equal else 1)))
    # The best of each source, then the second best of each, and so on.
    for place in range(_FIRST_SAME):
        for equal, genomes in found:
            if place < len(genomes):
                (same if equal else other).setdefault(genomes[place])
    return [*list(same)[:_FIRST_SAME], *list(other)[:_FIRST_OTHER]]


def _choose_unlike(space: ScheduleSpace, trials: Sequence[ForeignTrial], most: int) -> list[Genome]:
    """Return the fastest schedules of one source without similar ones."""
    chosen: list[Genome] = []
    for trial in sorted(trials, key=lambda trial: (trial.median_s, trial.candidate)):
        genome = space.read(trial.trace_json)
        if genome is not None and all(distance(genome, each) > _ALIKE for each in chosen):
            chosen.append(genome)
        if len(chosen) == most:
            break
    return chosen


def spearman(left: Sequence[float] | Floats, right: Sequence[float] | Floats) -> float:
    """Return Spearman's rank correlation; 0 where a side is constant. Ties share their mean rank."""
    first, second = _ranks(np.asarray(left)), _ranks(np.asarray(right))
    if len(first) < 2 or first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
