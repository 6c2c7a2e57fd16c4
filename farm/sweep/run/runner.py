"""`farm sweep run`: one sweep from start to finish, or resumed: boards, grid, programs, visits.

`order` has the order, `session` the boards, `visitor` one board's work, `conductor` the next points, `document` the
results.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from farm.errors import UsageError
from farm.inventory.board_types import require_board_type
from farm.models.lengths import set_batch
from farm.models.source import ModelSource, resolve_model
from farm.points.values import Goal
from farm.processes.machine import close_abandoned_sweeps, process_identity
from farm.programs.order import ProgramOrder
from farm.settings import Settings
from farm.store import Store
from farm.sweep import stored
from farm.sweep.fit.pick import METER
from farm.sweep.plan import order
from farm.sweep.plan.order import SweepOrder, SweepPlace, SweepPreview, preview
from farm.sweep.run.programs import SweepProgram
from farm.sweep.run.session import SweepSession

__all__ = ["ZOO", "Say", "SweepPlace", "resume_sweep", "run_sweep"]

# The prefix of an origin that is no file.
ZOO = "zoo:"

Say = Callable[[str], None]


def run_sweep(
    wanted: SweepOrder,
    where: SweepPlace,
    goal: Goal,
    objective_named: bool,
    settings: Settings,
    store: Store,
    say: Say,
    made: Sequence[SweepProgram] = (),
) -> int:
    """Run a sweep; return its number in the store, with any end.

    `made` are the programs of all series if they are compiled already, for boards of this kind. Raises UsageError
    before anything is stored, and the error of an early end (`interrupted`, `failed`).
    """
    close_abandoned_sweeps(store)
    board_type = require_board_type(where.board_type)
    source = _resolve(wanted, wanted.model)
    found = preview(wanted, where, board_type, goal, objective_named, store.boards.fetch())
    session = SweepSession(wanted, where, board_type, source, settings, store, say, made)
    session.compile(found.target, found.simulated)
    with session:
        description = session.connect(goal.needs_power)
        if goal.wall and (METER not in description.rails or METER in description.total_rails):
            raise UsageError(
                f"--objective {goal.aim} needs an external meter beside the rails of {description.name}",
                "`meter:` in the fleet file names its program.",
            )
        released, why = session.read_released_idle(description)
        goal, notes = order.require_goal(goal, released is not None, objective_named, why)
        grid, more = session.plan_grid(description)
        more += session.prepare(description, released is not None)
        sweep = store.sweeps.start(
            command="sweep run",
            model=source.name,
            model_sha256=source.sha256,
            board_type=board_type.name,
            simulated=description.simulated,
            request=dataclasses.asdict(wanted) | {"where": dataclasses.asdict(where), "origin": source.origin},
            goal=stored.goal_to_dict(goal),
            grid=stored.grid_to_dict(grid),
            settings={
                "process": process_identity(),
                "notes": [*notes, *more],
                "has_power": released is not None,
                "programs": {f"{p.variant} {p.batch}": p.about for p in session.programs.values()},
                "environment": session.environment(description),
                "released_idle_w": stored.estimate_to_dict(released),
            },
        )
        say(f"sweep {sweep}: {len(grid)} operating points of {session.first.name}")
        for note in (*notes, *more):
            say(note)
        session.sweep(sweep, time.time(), grid, goal, {})
    return sweep


def preview_sweep(
    wanted: SweepOrder, where: SweepPlace, goal: Goal, objective_named: bool, store: Store
) -> SweepPreview:
    """Plan what `run_sweep` would do, as far as is known before a board is taken. Raises the same errors."""
    _resolve(wanted, wanted.model)
    board_type = require_board_type(where.board_type)
    return preview(wanted, where, board_type, goal, objective_named, store.boards.fetch())


def resume_sweep(sweep: int, settings: Settings, store: Store, say: Say, goal: Goal | None = None) -> None:
    """Resume a sweep from its visits. Raises what `run_sweep` raises.

    With a `goal` it continues until nothing can change the pick for that, beyond any budget of points.
    """
    close_abandoned_sweeps(store)
    row = store.sweeps.require(sweep)
    request = dict(row.request)
    where, origin = SweepPlace(**request.pop("where")), str(request.pop("origin"))
    wanted = SweepOrder.from_dict(request)
    source = _resolve(wanted, origin.removeprefix(ZOO))
    if source.sha256 != row.model_sha256:
        raise UsageError(f"{source.origin} is not the same any more as when sweep {sweep} began", "Begin a new sweep.")
    board_type = require_board_type(row.board_type)
    if goal is not None:
        wanted = dataclasses.replace(wanted, budget_points=None)
    goal = goal or stored.goal_from_dict(row.goal)
    found = preview(wanted, where, board_type, goal, False, store.boards.fetch())
    session = SweepSession(wanted, where, board_type, source, settings, store, say)
    session.compile(found.target, found.simulated)
    with session:
        description = session.connect()
        if description.simulated != row.simulated:
            raise UsageError(f"sweep {sweep} was made on {'simulated' if row.simulated else 'real'} boards")
        grid = stored.grid_from_dict(row.grid)
        session.require_grid(grid, description)
        session.prepare(description, bool(row.settings.get("has_power", description.total_rails)))
        store.sweeps.resume(sweep, process_identity())
        before = stored.read_visits(store.sweeps.fetch_points(sweep))
        say(f"going on with sweep {sweep}: {sum(map(len, before.values()))} visits are there")
        session.sweep(sweep, row.started_at, grid, goal, before)


def _resolve(wanted: SweepOrder, model: str) -> ModelSource | ProgramOrder:
    """Return the model or program, after the checks that need no board. Raises UsageError."""
    if wanted.program is not None:
        return wanted.program
    source = resolve_model(model)
    for batch in wanted.batches:
        set_batch(source, wanted.shapes, batch)
    return source
