"""`farm campaign`: several models tuned on boards of several types, within one budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder
from farm.campaign import artifacts, spec, submit
from farm.campaign.engine import control
from farm.cli import campaign_options, campaign_plan, options, output, tables
from farm.cli.campaign_options import CampaignScreen, Name, draw
from farm.errors import UsageError
from farm.processes import machine
from farm.report import campaign_document, campaign_rows, campaign_words
from farm.settings import Settings
from farm.store import Store
from farm.types import campaigns
from farm.types.states import CampaignState
from farm.units import format_minute

Detach = Annotated[
    bool, typer.Option("--detach", help="Do not wait for it; `farm campaign resume NAME` shows it at any time.")
]


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
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for a report: pages, tables, pictures and JSON.")
    ] = None,
) -> output.Document:
    """Show a campaign. Its tasks, how far each is, its boards and winners; --out writes its report, at any time."""
    with options.open_store_to_show() as store:
        campaign = store.campaigns.require(name)
        make = campaign_document.make_document if out is None else campaign_document.make_report
        document = make(store, name)
    if out is not None:
        document["report"] = campaign_words.write_campaign_report(document, out, output.note)
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
def budget(name: Name, limits: campaign_options.Limits) -> output.Document:
    """Change the budget of a campaign, under way or not. What is not named stays; `none` takes a limit away."""
    changes = campaign_options.read_limits(limits)
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
    hours, board_hours = (each and each / 3600 for each in (limits.wall_clock_s, limits.board_s))
    counts = (("{:,} trials", limits.trials), ("{:,} per workload", limits.per_workload))
    return [
        form.format(value) for form, value in (*counts, ("{:g} h", hours), ("{:g} board-hours", board_hours)) if value
    ]


@output.command
def run(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A campaign file; docs/howto/plan-a-campaign.md says how to write one."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would do: workloads, boards, trials, time.")
    ] = False,
    again: Annotated[str, typer.Option("--from", metavar="NAME", help="Run a campaign again, without a file.")] = "",
    name: Annotated[str, typer.Option("--name", metavar="NEW", help="Name of the campaign that --from makes.")] = "",
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", min=1, help="Trials of the campaign that --from makes.")
    ] = None,
    detach: Detach = False,
    compile_to: campaign_options.CompileTo = None,
    json: options.Json = False,
) -> None:
    """Carry out a campaign. Ctrl-C pauses it; `farm campaign resume NAME` goes on."""
    if again or name or trials:
        if file is not None or dry_run or not (again and name):
            raise UsageError("--from OLD --name NEW run a campaign again, without a file")
        _run_again(again, name, {} if trials is None else {"trials": trials}, detach, json)
        return
    if file is None:
        raise UsageError("which campaign?", "Give a campaign file, or --from OLD --name NEW.")
    if dry_run:
        output.carry_out(campaign_plan.plan(file), json)
        return
    if detach and compile_to is not None:
        raise UsageError(
            "--compile waits for the campaign's end, --detach does not",
            "Leave one of both out; `farm campaign resume NAME --compile DIR` does it later.",
        )
    if compile_to is not None:
        artifact_folder.require_room(compile_to)

    campaign = spec.read_campaign(file)
    settings = farm_settings.load()
    screen = CampaignScreen()
    with options.open_store(settings) as store, control.EnginePrestart(settings) as engine:
        command = f"campaign run {file}"
        folder = campaign_options.to_folder(compile_to)
        who = machine.name_user()
        started = submit.submit(campaign, store, settings, who, command, screen.note, engine.begin, folder)
        _carry_out(engine, settings, store, started, screen, detach, json)
    if not detach:
        campaign_options.make(settings, started, screen.note, json)


@output.command
def resume(
    name: Name, detach: Detach = False, compile_to: campaign_options.CompileTo = None, json: options.Json = False
) -> None:
    """Resume a campaign, or show one that runs. Every trial that it made is kept, and none is made twice.

    Ctrl-C pauses what this command resumed; of a campaign that ran already it ends the display alone. What it was
    ordered to be compiled into is made once it is finished, also where a command was ended meanwhile.
    """
    settings = farm_settings.load()
    screen = CampaignScreen()
    if compile_to is not None:
        artifact_folder.require_room(compile_to)
    with options.open_store(settings) as store:
        if compile_to is not None:
            store.campaigns.change_folder(name, str(campaign_options.to_folder(compile_to)), machine.name_user())
        campaign = store.campaigns.require(name)
        if not artifacts.is_pending(campaign, campaign_document.summarise(campaign)):
            stood = campaign.state in (CampaignState.PAUSED, CampaignState.INTERRUPTED)
            control.resume(store, name, machine.name_user())
            with control.EnginePrestart(settings) as engine:
                _carry_out(engine, settings, store, name, screen, detach, json, pauses=stood)
    if not detach:
        campaign_options.make(settings, name, screen.note, json)


def _run_again(name: str, new: str, changes: dict[str, Any], detach: bool, json: bool) -> None:
    """Run a campaign again under another name; `farm campaign budget` changes what it may use."""
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        submit.clone(store, name, new, changes, machine.name_user(), f"campaign run --from {name} --name {new}")
        with control.EnginePrestart(settings) as engine:
            _carry_out(engine, settings, store, new, CampaignScreen(), detach, json)


def _carry_out(
    engine: control.EnginePrestart,
    settings: Settings,
    store: Store,
    name: str,
    screen: CampaignScreen,
    detach: bool,
    json: bool,
    *,
    pauses: bool = True,
) -> None:
    """Ensure that an engine runs the campaign, and follow it; Ctrl-C pauses it, or without `pauses` only detaches."""
    try:
        engine.ensure()
        if not detach:
            _follow(settings, store, name, screen, json, more=True)
            return
    except KeyboardInterrupt:
        screen.close()
        if not pauses:
            screen.note(f"detached; `farm campaign resume {name}` shows the campaign again")
            raise SystemExit(output.INTERRUPTED) from None
        state = control.pause(settings, store, name, machine.name_user()).state
        said = "is paused" if state is CampaignState.PAUSED else f"is {state} and will be paused"
        screen.note(f"campaign {name} {said}; `farm campaign resume {name}` goes on")
        raise SystemExit(output.INTERRUPTED) from None
    campaign = store.campaigns.require(name)
    if json:
        output.print_json(campaign_document.summarise(campaign))
    else:
        print(f"campaign {name} goes on by itself; `farm campaign resume {name}` shows it")


def _follow(
    settings: Settings, store: Store, name: str, screen: CampaignScreen, json: bool, more: bool = False
) -> None:
    """Show a campaign until it is settled, then its end. Raises what its end stands for.

    With `more` artifacts follow where they were ordered: where it ended well, nothing is said on stdout then.
    """
    try:
        campaign = control.wait_settled(settings, store, name, on_progress=screen.show)
    finally:
        screen.close()
    screen.finish(campaign)
    error = control.find_error(campaign)
    told = not (more and campaign.order.compile_to is not None)
    if json and (told or error is not None):
        output.print_json(campaign_document.make_document(store, name))
    if error is not None:
        raise error
    if told and not json:
        print(f"`farm campaign show {name} --out FOLDER` writes its report; `farm record list` shows records")
        document = campaign_document.summarise(campaign)
        for final in campaign_rows.list_finals(document["progress"]):
            output.say(campaign_rows.describe_final(final))
        if artifacts.is_pending(campaign, document):
            print(f"`farm campaign resume {name}` makes its artifacts in {campaign.order.compile_to}")
            return
        for each in artifact_folder.list_artifacts(document):
            output.stdout.print(each.command, soft_wrap=True, markup=False)  # to be copied


app = typer.Typer(help="Campaigns: models x board types x operating points, in one YAML file.", no_args_is_help=True)

app.command("run")(run)
app.command("resume")(resume)
app.command("list")(list_campaigns)
app.command("show")(show)
app.command("pause")(pause)
app.command("cancel")(cancel)
app.command("budget")(budget)
