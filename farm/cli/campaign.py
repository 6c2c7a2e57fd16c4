"""`farm campaign`: several models tuned on boards of several types, within one budget."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from device_agent.protocol import is_name
from farm import settings as farm_settings
from farm.artifacts import catalogue
from farm.campaign import artifacts, spec
from farm.campaign import plan as campaign_plan
from farm.campaign.engine import control
from farm.cli import campaign_run, options, output, tables
from farm.cli.campaign_options import Limits, Name, draw
from farm.errors import UsageError
from farm.processes import machine
from farm.report import campaign_document, campaign_page, campaign_rows
from farm.types import campaigns
from farm.units import format_minute
from farm.values import CampaignState

if TYPE_CHECKING:
    from farm.campaign.plan import CampaignPlan, PlannedType


@output.command
def list_campaigns() -> output.Document:
    """List the campaigns in the store, the newest first."""
    with options.open_store_to_show() as store:
        campaigns = store.campaigns.fetch()[::-1]
    yield [campaign_document.shorten(each) for each in campaigns]
    tables.print_table(
        ("Campaign", "Owner", "Models", "Board types", "State", "Trials", "Budget", "Started", "Why"),
        [_row(each) for each in campaigns],
        left=(0, 1, 2, 3, 4, 6, 7, 8),
        spare=("Owner", "Started", "Budget", "Board types"),
        empty="no campaigns yet; `farm campaign run FILE` makes one",
    )


@output.command
def show(name: Name) -> output.Document:
    """Show a campaign. Its tasks, how far each is, its boards and winners."""
    with options.open_store_to_show() as store:
        campaign = store.campaigns.require(name)
        document = campaign_document.make_document(store, name)
    yield document
    output.stdout.print(draw(campaign, None, output.stdout.width if output.stdout.is_terminal else None))
    for final in campaign_rows.list_finals(document["progress"]):
        output.say(campaign_rows.describe_final(final))
    found = sum(each["median_s"] is not None for each in document["winners"])
    if artifacts.is_pending(campaign, document):
        print(f"`farm campaign resume {name}` makes its artifacts in {campaign.order.compile_to}")
    for each in catalogue.list_artifacts(document) if found else ():
        output.stdout.print(f"to compile: {each.command}", soft_wrap=True, markup=False)  # to be copied
    output.say(
        f"{found} of {len(document['winners'])} tasks have a record",
        f"owner {campaign.owner}, submitted {format_minute(campaign.started_at)} by `farm {campaign.command}`",
    )


@output.command
def report(
    name: Name,
    out: Annotated[
        pathlib.Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the report; default: ./campaign-NAME."),
    ] = None,
) -> output.Document:
    """Write a campaign's report. Pictures and tables as HTML and Markdown, and JSON. At any time."""
    with options.open_store_to_show() as store:
        document = campaign_document.make_report(store, name)
    if out is None and not is_name(name):  # a restored store may hold any
        raise UsageError(f"{name!r} cannot name a folder", "Say with --out where the report is to go.")
    paths = campaign_page.write_campaign_report(document, out or pathlib.Path(f"campaign-{name}"), output.note)
    yield {"campaign": name, "report": paths}
    print(paths["page"])


@output.command
def pause(name: Name) -> output.Document:
    """Pause a campaign. Boards end what they measure and go to others. `resume` lets it go on."""
    yield from _change(name, "pause", CampaignState.PAUSED)


@output.command
def cancel(name: Name) -> output.Document:
    """End a campaign for good. Its trials stay, and help later ones; winners are not looked for."""
    yield from _change(name, "cancel", CampaignState.CANCELLED)


@output.command
@options.spread("limits", Limits)
def budget(name: Name, limits: Limits) -> output.Document:
    """Change the budget of a campaign, under way or not. What is not named stays; `none` takes a limit away."""
    if not (changes := limits.read()):
        raise UsageError(
            "no limit was given", "Give --trials, --wall-clock, --board-hours, --per-workload or --joules."
        )
    with options.open_store() as store:
        control.change_budget(store, name, changes, machine.name_user())
        campaign = store.campaigns.require(name)
    yield campaign_document.shorten(campaign)
    told = ", ".join(f"{key} {value:g}" for key, value in campaign.budget if value is not None)
    print(f"campaign {name} may use: {told}")


def _change(name: str, verb: str, wanted: CampaignState) -> output.Document:
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        campaign = (control.pause if verb == "pause" else control.cancel)(settings, store, name, machine.name_user())
    yield campaign_document.shorten(campaign)
    if campaign.state is wanted:
        print(f"campaign {name} is {campaign.state}")
    else:
        print(f"campaign {name} is {campaign.state}; its engine makes it {wanted} at its next step")


def _row(campaign: campaigns.FleetCampaign) -> tuple[object, ...]:
    progress = campaign.progress or {}
    return (
        campaign.name,
        campaign.owner,
        ", ".join(each.name for each in campaign.order.models),
        ", ".join(each.board_type + (" (simulated)" if each.simulated else "") for each in campaign.order.types),
        campaign.state,
        f"{progress.get('counted', 0):,}",
        "; ".join(_list_limits(campaign)),
        format_minute(campaign.started_at),
        campaign.reason,
    )


def _list_limits(campaign: campaigns.FleetCampaign) -> list[str]:
    limits = campaign.budget
    found = []
    if limits.trials is not None:
        found.append(f"{limits.trials:,} trials")
    if limits.per_workload is not None:
        found.append(f"{limits.per_workload:,} per workload")
    if limits.wall_clock_s is not None:
        found.append(f"{limits.wall_clock_s / 3600:g} h")
    if limits.board_s is not None:
        found.append(f"{limits.board_s / 3600:g} board-hours")
    return found


app = typer.Typer(help="Campaigns: models x board types x operating points, in one YAML file.", no_args_is_help=True)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A campaign file; docs/howto/plan-a-campaign.md says how to write one.")
]
_LIMITS = {
    "trials": "all trials are spent",
    "per_workload": "every workload has had its trials",
    "board_hours": "the board-hours are spent",
    "wall_clock": "the time is over",
    "joules": "the energy is spent",
}


@app.command("plan")
@output.command
def plan(file: File) -> output.Document:
    """Say what a campaign would do. Workloads, boards, what records cover, trials, board-hours, time."""
    campaign = spec.read_campaign(file)
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        planned = campaign_plan.make_plan(campaign, store, settings, output.note)
    document = {"file": str(file.absolute()), **campaign_plan.to_document(planned)}
    for line in _compare(settings.home_path, document):
        output.note(line)
    kept = campaign_plan.keep_plan(settings.home_path, document)
    yield document
    _print_plan(planned)
    output.say(f"kept as {kept}")


def _compare(home: Path, document: Mapping[str, Any]) -> Iterator[str]:
    """Return the differences from the last plan of this name."""
    try:
        last = campaign_plan.find_plan(home, document["name"])
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
            point.at.key,
            point.workloads,
            point.recorded,
            point.candidates,
            len(point.at.boards),
            point.good,
            point.idle,
            f"{point.trials:,}",
            f"{point.board_hours:.2f}",
            None if point.eta_s is None else _span(point.eta_s),
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
        for board, why in point.at.missing.items():
            yield f"{name}: {board} not at {point.at.key}: {why}"
    for note in boards.notes:
        yield f"{name}: {note}"


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


app.command("run")(campaign_run.run)
app.command("attach")(campaign_run.attach)
app.command("resume")(campaign_run.resume)
app.command("clone")(campaign_run.clone)
app.command("list")(list_campaigns)
app.command("show")(show)
app.command("report")(report)
app.command("pause")(pause)
app.command("cancel")(cancel)
app.command("budget")(budget)
