"""Play seeds with one line of the product changed, in a process of its own: `python tests/mutant.py NAME FIRST COUNT`.

It prints the first seed in which something did not hold, and what. `MUTANTS` says which line becomes which.
"""

from __future__ import annotations

import importlib.machinery
import pathlib
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """One fault: in `path` below farm/, the text `old` (once) becomes `new`. `seed` finds it; None: none is known."""

    path: str
    old: str
    new: str
    seed: int | None


MUTANTS = {
    # Leases and claims
    "a lease is not renewed": Mutant(
        "crew/leased_board.py",
        "store.leases.renew_all(list(leases.values()), watched)",
        "{each: each for each in leases.values()}",
        7,
    ),
    "a lease is never given back": Mutant(
        "crew/leased_board.py", "            store.leases.release(self.lease)\n", "            pass\n", 4
    ),
    "two engines take one campaign": Mutant(
        "store/campaigns.py",
        "found.engine is not None and dict(found.engine) != dict(engine):",
        "False:",
        None,
    ),
    "an agent is not fenced": Mutant(
        "measure/answers.py",
        "    if claim is None:\n        return None\n    address",
        "    return None\n    address",
        None,
    ),
    # Boards
    "clocks are taken for pinned": Mutant(
        "crew/held_board.py", "if point == self._pinned:", "if self._pinned is not None:", 0
    ),
    "an engine that ends keeps its boards": Mutant(
        "campaign/engine/board_keeping.py",
        "            self._give_back(held)\n        self._held",
        "            pass\n        self._held",
        11,
    ),
    "an agent takes an earlier lease": Mutant(
        "../device_agent/session/fencing.py", "claim.token < latest.token:", "False:", None
    ),
    # The scheduler
    "a board that left gets work": Mutant("campaign/scheduler/events.py", "    fleet.take_board(board)\n", "", 3),
    "an exhausted search is asked for ever": Mutant(
        "campaign/scheduler/events.py",
        "    if (exhausted or not candidates) and not task.ended:",
        "    if False:",
        90,
    ),
    "a budget is exceeded by one": Mutant(
        "campaign/scheduler/scheduler.py",
        "campaign.counted >= budget.trials:",
        "campaign.counted > budget.trials:",
        0,
    ),
    "a board's place is forgotten": Mutant(
        "campaign/scheduler/fleet.py",
        "            self.set_board(board, running=None)\n",
        "            board.running = None\n",
        0,
    ),
    "a job that a board lost is forgotten": Mutant(
        "campaign/scheduler/fleet.py",
        "        if not job.assignments:\n            self.queue(job, AGAIN)",
        "        pass",
        2,
    ),
    "trials are not given back": Mutant(
        "campaign/scheduler/fleet.py", "        campaign.open -= count\n        self.may", "        self.may", 0
    ),
    # The engine, resume and verification
    "a resumed campaign has a new budget": Mutant(
        "campaign/engine/progress.py", "        campaign.counted += 1\n", "", None
    ),
    "a candidate is timed unchecked": Mutant(
        "campaign/verify/task.py",
        "return bool(self.programs) and all(self.programs[name].settled for name in self._live())",
        "return bool(self.programs)",
        None,
    ),
    "known candidates are not recalled": Mutant(
        "campaign/engine/orders.py",
        "        return [(each.candidate, each.trace_json, each.median_s) for each in known]",
        "        return []",
        7,
    ),
    "a restarted search forgets what is under way": Mutant(
        "campaign/engine/orders.py",
        "            under_way = [(each.hash, each.trace_json) for each in candidates]",
        "            under_way = []",
        0,
    ),
    "requests of a dead search are lost": Mutant(
        "campaign/engine/searches.py", "            self._again += asked\n", "            pass\n", 0
    ),
    "a dead engine's campaign stays as it is": Mutant(
        "campaign/engine/control.py", "        return engine != me and are_gone(engine)", "        return False", 0
    ),
    "each of two verifications waits for the other's board": Mutant(
        "campaign/engine/verifying.py",
        " or any(_count_missing(other, kind) > 0 for other in earlier)",
        "",
        7,
    ),
    "wrong outputs become a record": Mutant(
        "campaign/verify/programs.py", "if not program.comparison.matches:", "if False:", 3
    ),
}


def apply(mutant: Mutant) -> None:
    """Change the line for all imports of this process."""
    changed = str((ROOT / "farm" / mutant.path).resolve())
    source = pathlib.Path(changed).read_text()
    assert source.count(mutant.old) == 1, f"{source.count(mutant.old)} times in {changed}: {mutant.old}"
    read = importlib.machinery.SourceFileLoader.get_data
    stats = importlib.machinery.SourceFileLoader.path_stats

    def get_data(self: importlib.machinery.SourceFileLoader, path: str) -> bytes:
        return source.replace(mutant.old, mutant.new).encode() if path == changed else read(self, path)

    def path_stats(self: importlib.machinery.SourceFileLoader, path: str) -> dict[str, float]:
        if path == changed:
            raise OSError  # then nothing compiled is read or written
        return dict(stats(self, path))

    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    importlib.machinery.SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign,assignment]


def main() -> None:
    """Find a seed."""
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if name:
        apply(MUTANTS[name])
    from farm.testing import simulation

    for seed in range(first, first + count):
        if failures := simulation.play(seed).watch.failures:
            print(f"{seed}: {failures[0]}")
            return
    print("none")


if __name__ == "__main__":
    main()
