"""`droplet`: coordinate descent from the best measured schedule, one decision and one step at a time.

After Canesche et al., "The Droplet Search Algorithm for Kernel Scheduling" (ACM TACO, 2024). TVM 0.27 has it only as an
optimisation of finished runs that measures by itself; here it is a tuner among others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from farm.search.tuners import strategies
from farm.search.tuners.decisions import Genome, neighbours
from farm.search.tuners.history import TaskHistory
from farm.search.tuners.schedule_space import Evaluated

# So many of the best are descended from, one after the other; each ends in a valley of its own.
_ORIGINS = 8


def descend(history: TaskHistory, count: int, first: int) -> list[Evaluated]:
    """New neighbours of the best measured schedule; of the next best where it has none left; in the end random ones.

    Until `first` candidates are known they are promising ones, to have a place to begin.
    """
    if history.step < first or not history.fastest(1):
        return strategies.draw_promising(history, count)
    found = strategies.take_new(history, count, _steps(history), patience=float("inf"))
    if len(found) < count:
        names = {each.hash for each in found}
        found += [each for each in strategies.draw_new(history, count) if each.hash not in names][: count - len(found)]
    return found


def _steps(history: TaskHistory) -> Iterator[tuple[Genome, int]]:
    best = [result.genome for result in history.fastest(_ORIGINS)]
    for origin, before in itertools.zip_longest(best, best[1:2]):
        if origin is None:
            return
        rows = neighbours(origin, history.space.knobs[origin.sketch])
        # What was changed to get here is likely to lead further.
        start = _changed(origin, before) if before is not None else 0
        for row in [*rows[start:], *rows[:start]]:
            yield from ((genome, 0) for genome in row)


def _changed(genome: Genome, before: Genome) -> int:
    if genome.sketch != before.sketch:
        return 0
    pairs = enumerate(zip(genome.decisions, before.decisions, strict=True))
    return next((index for index, (now, then) in pairs if now != then), 0)
