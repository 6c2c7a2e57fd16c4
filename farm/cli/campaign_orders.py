"""`farm campaign list`, `show`, `report`, `pause`, `cancel`, `budget`: what there is, and what operators want of it."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from device_agent.protocol import is_name
from farm import settings as farm_settings
from farm.artifacts.listed import list_artifacts
from farm.campaign.artifacts import find_folder, is_pending
from farm.campaign.engine import control
from farm.cli import campaign_options, options, output, tables
from farm.cli.campaign_options import Name
from farm.errors import UsageError
from farm.processes.machine import name_user
from farm.report import campaign_page, campaign_rows, campaign_table
from farm.report.campaign_document import make_document, shorten
from farm.units import format_minute
from farm.values import CampaignState, FleetCampaign


def register(app: typer.Typer) -> None:
    """Add the commands to `farm campaign`."""
    app.command("list")(list_campaigns)
    app.command("show")(show)
    app.command("report")(report)
    app.command("pause")(pause)
    app.command("cancel")(cancel)
    app.command("budget")(budget)


@output.command
def list_campaigns() -> output.Document:
    """List the campaigns in the store, the newest first."""
    with options.open_store_to_show() as store:
        campaigns = store.fetch_fleet_campaigns()[::-1]
    yield [shorten(each) for each in campaigns]
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
        campaign = store.fetch_fleet_campaign(name)
        document = make_document(store, name)
    yield document
    output.stdout.print(
        campaign_table.draw(
            campaign.name,
            campaign.state,
            campaign.reason,
            campaign.budget,
            campaign.progress,
            None,
            output.stdout.width if output.stdout.is_terminal else None,
        )
    )
    for final in campaign_rows.list_finals(document["progress"]):
        output.say(campaign_rows.describe_final(final))
    found = sum(each["median_s"] is not None for each in document["winners"])
    if is_pending(campaign, document):
        print(f"`farm campaign resume {name}` makes its artifacts in {find_folder(campaign)}")
    for each in list_artifacts(document) if found else ():
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
        document = make_document(store, name)
    if out is None and not is_name(name):  # one of an earlier version's, which took any
        raise UsageError(f"{name!r} cannot name a folder", "Say with --out where the report is to go.")
    paths = campaign_page.write_campaign_report(document, out or pathlib.Path(f"campaign-{name}"))
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
def budget(
    name: Name,
    trials: campaign_options.Trials = None,
    wall_clock: campaign_options.WallClock = None,
    board_hours: campaign_options.BoardHours = None,
    per_workload: campaign_options.PerWorkload = None,
) -> output.Document:
    """Change the budget of a campaign, under way or not. What is not named stays; `none` takes a limit away."""
    changes = campaign_options.read_budget(trials, wall_clock, board_hours, per_workload)
    if not changes:
        raise UsageError("no limit was given", "Give --trials, --wall-clock, --board-hours or --per-workload.")
    with options.open_store() as store:
        control.change_budget(store, name, changes, name_user())
        campaign = store.fetch_fleet_campaign(name)
    yield shorten(campaign)
    limits = ", ".join(f"{key} {value:g}" for key, value in campaign.budget.items() if value is not None)
    print(f"campaign {name} may use: {limits}")


def _change(name: str, verb: str, wanted: CampaignState) -> output.Document:
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        campaign = (control.pause if verb == "pause" else control.cancel)(settings, store, name, name_user())
    yield shorten(campaign)
    if campaign.state is wanted:
        print(f"campaign {name} is {campaign.state}")
    else:
        print(f"campaign {name} is {campaign.state}; it will be {wanted} as soon as its engine comes to it")


def _row(campaign: FleetCampaign) -> tuple[object, ...]:
    progress = campaign.progress or {}
    return (
        campaign.name,
        campaign.owner,
        ", ".join(each["name"] for each in campaign.order["models"]),
        ", ".join(
            each["board_type"] + (" (simulated)" if each["simulated"] else "") for each in campaign.order["types"]
        ),
        campaign.state,
        f"{progress.get('counted', 0):,}",
        "; ".join(_list_limits(campaign)),
        format_minute(campaign.started_at),
        campaign.reason,
    )


def _list_limits(campaign: FleetCampaign) -> list[str]:
    limits = campaign.budget
    texts = {
        "trials": "{:,} trials",
        "per_workload": "{:,} per workload",
    }
    found = [text.format(limits[key]) for key, text in texts.items() if limits.get(key) is not None]
    if limits.get("wall_clock_s") is not None:
        found.append(f"{limits['wall_clock_s'] / 3600:g} h")
    if limits.get("board_s") is not None:
        found.append(f"{limits['board_s'] / 3600:g} board-hours")
    return found
