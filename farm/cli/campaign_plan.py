"""`farm campaign run --dry-run`: what a campaign would do, as text and as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm import settings as farm_settings
from farm.campaign import plan as campaign_plan
from farm.campaign import plan_document, spec
from farm.cli import options, output, tables
from farm.errors import UsageError

if TYPE_CHECKING:
    from farm.campaign.plan import CampaignPlan, PlannedType

_LIMITS = {
    "trials": "all trials are spent",
    "per_workload": "every workload has had its trials",
    "board_hours": "the board-hours are spent",
    "wall_clock": "the time is over",
    "joules": "the energy is spent",
}


def plan(file: Path) -> output.Document:
    """Say what a campaign would do. Workloads, boards, what records cover, trials, board-hours, time."""
    campaign = spec.read_campaign(file)
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        planned = campaign_plan.make_plan(campaign, store, settings, output.note)
    document = {"file": str(file.absolute()), **plan_document.to_document(planned)}
    for line in _compare(settings.home_path, document):
        output.note(line)
    kept = plan_document.keep_plan(settings.home_path, document)
    yield document
    _print_plan(planned)
    output.say(f"kept as {kept}")


def _compare(home: Path, document: Mapping[str, Any]) -> Iterator[str]:
    """Return the differences from the last plan of this name."""
    try:
        last = plan_document.find_plan(home, document["name"])
    except UsageError:
        # The caller replaces it.
        return
    if last is None:
        return
    if last.get("file") != document["file"]:
        yield f"this takes the place of the plan of {last.get('file')}, a campaign of the same name"
        return
    before = {each["name"]: each["sha256"] for each in last["models"]}
    for each in document["models"]:
        if before.get(each["name"], each["sha256"]) != each["sha256"]:
            yield f"{each['name']} has changed since the last plan"


def _print_plan(planned: CampaignPlan) -> None:
    output.say(f"campaign {planned.spec.name}")
    tables.print_table(
        ("Model", "Batch", "Inputs", "SHA-256"),
        [
            (
                model.name,
                model.batch,
                ", ".join(f"{each.name} {'x'.join(map(str, each.static_shape))}" for each in model.inputs),
                model.source.sha256[:12],
            )
            for model in planned.models
        ],
        left=(0, 2, 3),
    )
    rows = [
        (
            each.boards.board_type.name,
            *(point[key] for key in ("point", "workloads", "recorded", "known_candidates")),
            len(point["boards"]),
            *(point["good"], point["idle"], f"{point['trials']:,}", f"{point['board_hours']:.2f}"),
            None if point["seconds"] is None else _span(point["seconds"]),
        )
        for each in planned.types
        for point in each.points
    ]
    heads = (
        "Type", "Point", "Workloads", "Recorded", "Known", "Boards", "Good", "Idle", "Trials", "Board-hours",
        "Busy for",
    )  # fmt: skip
    tables.print_table(heads, rows, left=(0, 1), spare=("Known", "Good", "Board-hours", "Recorded"))
    output.say(*_describe(planned))


def _describe(planned: CampaignPlan) -> Iterator[str]:
    estimated = planned.estimate
    for each in planned.types:
        yield from _describe_type(each)
    if estimated.eta_s is None:
        yield f"no estimate: {estimated.limit} now"
        return
    if not planned.trials:
        yield f"the budget ends before the first trial: raise {estimated.limit}"
        return
    if planned.trials < planned.tasks:
        yield (
            f"warning: {planned.trials:,} trials are fewer than {planned.tasks:,} workloads on their board types at "
            f"their operating points: {planned.tasks - planned.trials:,} or more get none, and no record"
        )
    slower = "this host" if estimated.host_s > estimated.boards_s else "the boards"
    cores = "1 core needs" if planned.host_cores == 1 else f"{planned.host_cores} cores need"
    energy = f" and {estimated.energy_j:,.0f} J at their idle power" if estimated.energy_j else ""
    alone = f"; as a board it needs {_span(estimated.alone_s)} more" if estimated.alone_s else ""
    yield (
        f"this host: {cores} {_span(estimated.host_s)} for search and builds{alone}; boards elsewhere: "
        f"{_span(estimated.boards_s)} at the same time; the slower is {slower}"
    )
    yield (
        f"about {planned.trials:,} trials in {_span(estimated.trials_s)}, "
        f"then at most {planned.winners:,} measurements of winners "
        f"({_span(estimated.winners_s)} with their checks), then models are compiled and timed "
        f"({_span(estimated.finals_s)}); together {_span(3600 * planned.board_hours)} of boards' time{energy}, "
        f"{_span(estimated.eta_s)}; "
        f"it ends when {_LIMITS[estimated.limit]}, or earlier where workloads stop early"
    )


def _describe_type(planned: PlannedType) -> Iterator[str]:
    boards, costs = planned.boards, planned.costs
    name = boards.board_type.name
    simulated = ", simulated" if boards.simulated else ""
    yield (
        f"{name}{simulated}: {len(planned.workloads)} workloads, of {planned.extracted} in the models; "
        f"graph pipeline {', '.join(planned.pipelines)}"
    )
    known = f"median of {costs.trials} trials"
    yield (
        f"{name}: a trial holds a board for {planned.held_s:.2f} s ({known if costs.held_s else 'assumed'}), its build "
        f"takes {planned.build_s:.2f} s ({known if costs.build_s is not None else 'assumed'}), its search "
        f"{planned.search_s:.2f} s (assumed)"
    )
    for text, why in boards.lacking.items():
        yield f"{name}: not at {text}: {why}"
    for text, why in boards.too_big.items():
        yield f"{name}: not {text}: {why}"
    for point in planned.points:
        for board, why in point["missing"].items():
            yield f"{name}: {board} not at {point['point']}: {why}"
    for note in boards.notes:
        yield f"{name}: {note}"


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
