"""`farm campaign`: several models tuned on boards of several types, within one budget."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder
from farm.campaign import artifacts
from farm.campaign.engine import control
from farm.cli import campaign_run, options, output, tables
from farm.cli.campaign_options import Limits, Name, draw
from farm.errors import UsageError
from farm.processes import machine
from farm.report import campaign_document, campaign_page, campaign_rows
from farm.types import campaigns
from farm.types.states import CampaignState
from farm.units import format_minute


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
def show(
    name: Name,
    out: Annotated[
        pathlib.Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for a report: pages, tables, pictures and JSON."),
    ] = None,
) -> output.Document:
    """Show a campaign. Its tasks, how far each is, its boards and winners; --out writes its report, at any time."""
    with options.open_store_to_show() as store:
        campaign = store.campaigns.require(name)
        make = campaign_document.make_document if out is None else campaign_document.make_report
        document = make(store, name)
    if out is not None:
        document["report"] = campaign_page.write_campaign_report(document, out, output.note)
    yield document
    if out is not None:
        print(document["report"]["page"])
        return
    output.stdout.print(draw(campaign, None, output.stdout.width if output.stdout.is_terminal else None))
    for final in campaign_rows.list_finals(document["progress"]):
        output.say(campaign_rows.describe_final(final))
    found = sum(each["median_s"] is not None for each in document["winners"])
    if artifacts.is_pending(campaign, document):
        print(f"`farm campaign resume {name}` makes its artifacts in {campaign.order.compile_to}")
    for each in artifact_folder.list_artifacts(document) if found else ():
        output.stdout.print(f"to compile: {each.command}", soft_wrap=True, markup=False)  # to be copied
    output.say(
        f"{found} of {len(document['winners'])} tasks have a record",
        f"owner {campaign.owner}, submitted {format_minute(campaign.started_at)} by `farm {campaign.command}`",
    )


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

app.command("run")(campaign_run.run)
app.command("attach")(campaign_run.attach)
app.command("resume")(campaign_run.resume)
app.command("list")(list_campaigns)
app.command("show")(show)
app.command("pause")(pause)
app.command("cancel")(cancel)
app.command("budget")(budget)
