"""`farm up`, `farm down`, `farm status`, `farm board probe`: the long-running services, and what they say of boards.

What the services do is in `farm/services/`; other commands start them for as long as they need them.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from farm import settings as farm_settings
from farm import units
from farm.campaign.engine.state import ENGINE
from farm.cli import options, output, tables
from farm.cli import web as cli_web
from farm.cli.options import read_duration_s
from farm.connectivity import services as connectivity_services
from farm.errors import DeadlineError, FarmError, PermanentError, TransientError, UsageError
from farm.services import daemon
from farm.settings import Settings
from farm.store import Store, standing
from farm.types import documents
from farm.values import Health, State
from farm.web import running

_LOOK_S = 0.25
# Of a probe of boards: a virtual one takes seconds to start, and a rack of them minutes.
_PROBE_S, _PROBE_EACH_S = 120.0, 5.0
# The interval of progress lines while a command waits for boards.
_TELL_S = 5.0
_OUT_OF_SERVICE = (Health.MAINTENANCE, Health.RETIRED, Health.UNSAFE)


@output.command
def up(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground and log to the terminal.")
    ] = False,
    wait: Annotated[
        str, typer.Option("--wait", metavar="60s", help="Longest wait for boards to be reached and probed.")
    ] = "",
    web: Annotated[bool, typer.Option("--web", help="Serve the farm's page as well.")] = False,
    take_over: Annotated[
        bool | None,
        typer.Option(
            "--take-over/--no-take-over",
            help="Go on here with campaigns whose engine was killed, on any host of a shared store.",
        ),
    ] = None,
) -> output.Document:
    """Start the farm's services: the tracker, connections to boards, health probes, metrics."""
    settings = farm_settings.load()
    wait_s = read_duration_s("--wait", wait) if wait else 0.0
    if take_over and not isinstance(settings.store_location, str):
        raise UsageError(
            "--take-over is for a store that several hosts share",
            "This one is a file of this host; `farm campaign resume` goes on with a campaign that was interrupted.",
        )
    if foreground:
        if web:
            _serve_page(settings)
        try:
            code = daemon.main(["--stay", "--foreground", *(["--take-over"] if take_over else [])])
        finally:
            if web:
                running.WEB.stop(settings.home_path)
        raise SystemExit(code)
    services, started = connectivity_services.start_services(settings, take_over)
    if started:
        output.stderr.print("the farm's services are up; `farm down` ends them")
    else:
        output.stderr.print("the farm's services were up already")
    if web:
        _serve_page(settings)
    if wait_s:
        _wait_probed(settings, wait_s)
    yield from _show(settings, services)


@output.command
def down(force: Annotated[bool, typer.Option("--force", help="Stop even if boards are leased.")] = False) -> None:
    """End the farm's services and everything they started. Boards and their agents elsewhere stay up.

    With --force campaigns under way are interrupted first; `farm campaign resume` lets them go on.
    """
    settings = farm_settings.load()
    if force and ENGINE.stop(settings.home_path):
        output.stderr.print("the engine of campaigns has ended; campaigns under way are interrupted")

    services = connectivity_services.find_services(settings)
    if services is not None and not force:
        _require_unused(settings, services)
    if running.WEB.stop(settings.home_path):
        output.stderr.print("the farm's page is served no more")
    if services is None:
        if connectivity_services.SERVICES.is_held(settings.home_path):
            raise TransientError("the farm's services are starting or ending just now", "Try again in a moment.")
        output.stderr.print("the farm's services are not running")
        return
    services.stop()
    output.stderr.print("the farm's services have ended")


@output.command
def status() -> output.Document:
    """Show the farm's services and how each board is reached. Exit code 3 where they do not run."""
    settings = farm_settings.load()
    services = connectivity_services.find_services(settings)
    if services is None:
        yield output.Failed({"running": False}, 3)
        output.stdout.print("the farm's services are not running; `farm up` starts them")
        return
    yield from _show(settings, services)


@output.command
def probe(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Boards; default: all in service.")] = None,
) -> output.Document:
    """Probe boards now. The golden kernel's result decides about their health."""
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        chosen = list(dict.fromkeys(names or ())) or [row.name for row in list_in_service(store)]
        for name in chosen:
            standing.require_kept(store.boards.require(name))
    if not chosen:
        raise UsageError("there are no boards to probe", "`farm board add` registers one.")
    with connectivity_services.using_services(settings, chosen, output.stderr.print) as services:
        timeout_s = _PROBE_S + _PROBE_EACH_S * len(chosen)
        output.note(f"probing {len(chosen)} board{'s' * (len(chosen) > 1)}, for {timeout_s:.0f} s at most")
        reports = services.probe(chosen, timeout_s)
    yield output.Failed(reports, _find_failure(reports))
    tables.print_table(
        ("Board", "Probe", "Health", "Golden kernel", "Took", "Why"),
        [
            (
                report["board"],
                "passed" if report["passed"] else "skipped" if report.get("skipped") else "FAILED",
                report.get("health") or "–",
                f"{report['median_s'] * 1e3:.3f} ms" if report.get("median_s") else "–",
                f"{report['seconds']:.1f} s",
                report.get("reason") or "–",
            )
            for report in reports
        ],
        left=(0, 1, 2, 5),
        spare=("Took", "Golden kernel", "Health"),
    )


def _find_failure(reports: list[dict[str, Any]]) -> FarmError | None:
    failed = [report["board"] for report in reports if not report["passed"]]
    if failed and all(report.get("skipped") or report["passed"] for report in reports):
        return TransientError(f"{len(failed)} of {len(reports)} boards could not be probed", "See the reasons above.")
    if failed:
        return PermanentError(f"{len(failed)} of {len(reports)} boards did not pass", "See the reasons above.")
    return None


def _serve_page(settings: Settings) -> None:
    cli_web.require_server()
    output.stderr.print(f"the farm's page: {running.start(settings.home_path)}")


def _wait_probed(settings: Settings, wait_s: float) -> None:
    """Wait until no board in service is out of reach or unproven. Raises DeadlineError naming one that is."""
    deadline = time.monotonic() + wait_s
    told, tell_at = -1, 0.0
    while True:
        with options.open_store(settings) as store:
            rows = list_in_service(store)
        waiting = [row for row in rows if row.health is not Health.GOOD or row.state is State.OFFLINE]
        if not waiting:
            return
        if time.monotonic() > deadline:
            first = waiting[0]
            cause = standing.find_cause(first)
            why = f"{cause.what}: {cause.why}" if cause else ""
            raise DeadlineError(
                f"{len(waiting)} of {len(rows)} boards are not ready after {wait_s:g} s; {first.name}: {why}",
                "The services stay up and go on trying; `farm status` shows how far they are.",
            )
        ready = len(rows) - len(waiting)
        if ready != told or time.monotonic() >= tell_at:
            told, tell_at = ready, time.monotonic() + _TELL_S
            names = units.name_some([row.name for row in waiting])
            output.note(
                f"{ready} of {len(rows)} boards are ready; waiting for {names}, for "
                f"{max(0.0, deadline - time.monotonic()):.0f} s more at most"
            )
        time.sleep(_LOOK_S)


def list_in_service(store: Store) -> list[documents.BoardInfo]:
    """Return the boards that the services keep connected and that are in service."""
    return [row for row in store.boards.fetch() if row.health not in _OUT_OF_SERVICE and not row.on_demand]


def _require_unused(settings: Settings, services: connectivity_services.Services) -> None:
    with options.open_store(settings) as store:
        leases = [
            f"{board.name} by {board.lease.owner} ({board.lease.purpose})"
            for board in store.boards.fetch()
            if board.lease and board.lease.purpose != "probe"
        ]
    held_by = services.fetch_status()["held_by"]
    if leases or held_by:
        who = "; ".join(leases[:3]) or f"{held_by} other commands"
        raise UsageError(f"boards are in use: {who}", "Wait for them, or end the services with --force.")


def _show(settings: Settings, services: connectivity_services.Services) -> output.Document:
    status = services.fetch_status()
    with options.open_store(settings) as store:
        rows = {row.name: row for row in store.boards.fetch()}
    for board in status["boards"]:
        row = rows.get(board["name"])
        board |= {key: getattr(row, key, None) for key in ("state", "health", "health_reason", "lease")}
        cause = standing.find_cause(row) if row else None
        board["why"] = "" if cause is None else cause.why
    yield {"running": True, **status}
    tracker = status["tracker"]
    lasted = _span(time.time() - status["started_at"])
    until = "until `farm down`" if status["stays"] else "until the commands that use them end"
    lines = [
        f"services  pid {status['pid']}, up for {lasted}, {until}",
        f"tracker   {tracker['host']}:{tracker['port']}{'' if tracker['up'] else ', DOWN'}, "
        f"restarted {tracker['restarts']} times",
        f"metrics   {status['metrics'] or 'off'}",
        *(["take-over campaigns whose engine was killed go on here"] if status["takes_over"] else []),
    ]
    output.say(*lines)
    output.stdout.print()
    tables.print_table(
        ("Board", "Connection", "Reachable", "State", "Held by", "Health", "Probed", "Trouble"),
        [
            (
                board["key"],
                board["transport"],
                "yes" if board["reachable"] else "no",
                board["state"] or "–",
                output.holder(board["lease"]),
                board["health"] or "–",
                _probed(board["probe"]),
                board["why"] or board["trouble"] or "–",
            )
            for board in status["boards"]
        ],
        left=(0, 1, 2, 3, 4, 5, 6, 7),
        empty="no boards; `farm board add` registers one",
        spare=("Connection", "Probed", "Reachable"),
    )


def _probed(report: dict[str, Any] | None) -> str:
    if report is None:
        return "–"
    what = "passed" if report["passed"] else "skipped" if report.get("skipped") else "FAILED"
    return f"{what} {_span(time.time() - report['at'])} ago"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
