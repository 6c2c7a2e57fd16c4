"""The pages' routes: lists and boards. Campaigns and sweeps have their own (`work_pages.py`)."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response

from device_agent.protocol import format_mhz
from farm import errors, units
from farm.artifacts import artifact_folder
from farm.campaign import artifacts
from farm.crew import queue_entry
from farm.crew.calibration import fetch_calibration
from farm.report import campaign_document
from farm.report.record_document import require_workload
from farm.store import Store
from farm.store.standing import BoardFilters
from farm.types.documents import BoardInfo
from farm.web import charts, live, now, orders, series
from farm.web.access import COOKIE, Person, Role
from farm.web.view import RecordFilters, Text, View, WantedArtifacts

PER_PAGE = 50
BOARDS_PER_PAGE = 500
_COOKIE_S = 30 * 86400
_USERS = 15
_EVENTS = 60

router = APIRouter(include_in_schema=False)

PageNumber = Annotated[int, Query(ge=1, le=10**6)]


def get_view(request: Request) -> View:
    """Return what the routes share."""
    view: View = request.app.state.view
    return view


def show(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a page. `command` is the command that shows the same."""
    view = get_view(request)
    person = view.access.find_person(request.headers, request.cookies.get(COOKIE, ""))
    html = view.render(
        template,
        person=person,
        may_reserve=person is not None and person.role.covers(Role.USER),
        may_change=functools.partial(orders.may_change, person),
        may_operate=person is not None and person.role.covers(Role.OPERATOR),
        path=request.scope["path"],
        query=dict(request.query_params),
        here=request.scope["path"] + (f"?{query}" if (query := request.scope["query_string"].decode()) else ""),
        **values,
    )
    return HTMLResponse(html, status)


def turn(request: Request, number: int, total: int, per_page: int) -> dict[str, Any]:
    """Return links to the pages of a list before and after this one."""

    def link(to: int) -> str:
        return "?" + urllib.parse.urlencode({**request.query_params, "page": to})

    last = max(1, -(-total // per_page))
    return {
        "number": number,
        "last": last,
        "total": total,
        "before": link(number - 1) if number > 1 else "",
        "after": link(number + 1) if number < last else "",
    }


@router.get("/")
def show_now(
    request: Request,
    text: Text = "",
    board_type: Text = "",
    state: Text = "",
    health: Text = "",
    made: Text = "",
    page: PageNumber = 1,
) -> HTMLResponse:
    """Show the state of boards and campaigns."""
    view, filters = get_view(request), BoardFilters(text.strip(), board_type, state, health, made)
    with view.stores.lend() as store:
        view.learn(store)
        boards = store.boards.fetch()
        campaigns = store.campaigns.fetch(over=False)
        rows = now.list_rows(boards, view.find_known(store, campaigns), filters)
        first = (page - 1) * BOARDS_PER_PAGE
        return show(
            request,
            "now.html",
            campaigns=[now.to_campaign_row(each, boards) for each in campaigns],
            queue=queue_entry.to_document(store)["requests"],
            rows=rows[first : first + BOARDS_PER_PAGE],
            turning=turn(request, page, len(rows), BOARDS_PER_PAGE),
            counts=now.count_boards(boards),
            types=sorted({board.board_type for board in boards}),
            events=now.list_events(store),
            filters=filters,
            command="farm board list",
        )


@router.get("/boards/{name}")
def show_board(request: Request, name: str) -> HTMLResponse:
    """Show a board: what it is, its history and its state."""
    view = get_view(request)
    with view.stores.lend() as store:
        view.learn(store)
        board = store.boards.require(name)
        known = view.find_known(store, store.campaigns.fetch(over=False))
        faults = store.events.fetch_last_faults(now.FAULTS, name)
        row = now.to_board_row(board, dataclasses.replace(known, faults=faults), time.time())
        calibration = fetch_calibration(store, board)
        readings = view.gauges.list_since(name, time.time() - series.KEPT_S)
        return show(
            request,
            "board.html",
            board=board,
            row=row,
            calibration=calibration,
            live=_read_live(view, board),
            charts=[*_draw_readings(readings), *_draw_golden(calibration)],
            readings=len(readings),
            events=now.list_events(store, name, _EVENTS),
            users=store.events.fetch_board_users(name, _USERS),
            facts=_list_facts(board),
            orders=[str(each) for each in orders.BOARD_ORDERS],
            limit_c=series.find_limit_c(board.board_type),
            command=f"farm board show {shlex.quote(name)}",
        )


@router.get("/boards/{name}/now")
def show_board_now(request: Request, name: str) -> HTMLResponse:
    """Show what the board's exporter says now: a piece of its page, which a script asks for again."""
    view = get_view(request)
    with view.stores.lend() as store:
        board = store.boards.require(name)
    return show(request, "board_now.html", board=board, live=_read_live(view, board), command="")


def _read_live(view: View, board: BoardInfo) -> dict[str, Any] | None:
    return None if board.on_demand else live.draw(view.live.read(board.name))


def _draw_readings(readings: Sequence[series.Reading]) -> Iterator[tuple[str, Any]]:
    """Draw clocks, power and temperature of the last hour, where the board reads them."""
    times = [each.at for each in readings]
    clocks = {
        domain: [(each.at, each.clocks_hz[domain] / 1e6) for each in readings if domain in each.clocks_hz]
        for domain in ("cpu", "gpu", "memory")
    }
    power = [(each.at, each.power_w) for each in readings if each.power_w is not None]
    temperature = [(each.at, each.temperature_c) for each in readings if each.temperature_c is not None]
    for title, unit, lines in (
        ("Clocks in runs", "MHz", clocks),
        ("Power", "W", {"power": power}),
        ("Temperature", "°C", {"temperature": temperature}),
    ):
        if drawn := [(name, line) for name, line in lines.items() if len(line) > 1]:
            names = f": {', '.join(name for name, _ in drawn)}" if lines is clocks else ""
            yield title + names, charts.show(charts.plan_times(title, f"{title} of the last hour", unit, drawn, times))


def _draw_golden(calibration: Any) -> Iterator[tuple[str, Any]]:
    if calibration is not None and len(calibration.samples) > 1:
        runs = [(each.at, each.median_s * 1e3) for each in calibration.samples]
        lines = [("golden kernel", runs)]
        yield "Golden kernel", charts.show(charts.plan_times("golden", "Golden kernel's times", "ms", lines, ()))


def _list_facts(board: BoardInfo) -> list[tuple[str, Any]]:
    """Describe a board in words: units for bytes, lists with commas."""
    said = ((key, _say_fact(key, value)) for key, value in board.description.items())
    return [(key.removesuffix("_bytes").removesuffix("_hz"), text) for key, text in said if text]


def _say_fact(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes") and isinstance(value, int):
        return units.format_bytes(value)
    if isinstance(value, str | int | float):
        return str(value)
    if key.endswith("_range_hz") and isinstance(value, Mapping):
        ranges = {tuple(each) for each in value.values() if isinstance(each, Sequence) and len(each) == 2}
        return ", ".join(f"{format_mhz(low)} to {format_mhz(high)} MHz" for low, high in sorted(ranges))
    if isinstance(value, Mapping):
        if all(isinstance(each, str | int | float) for each in value.values()):
            return ", ".join(f"{name} {each}" for name, each in value.items())
        return ", ".join(text for each in value.values() for text in _list_parts(each))
    if isinstance(value, Sequence):
        is_flat = all(isinstance(each, str | int | float) for each in value)
        return ", ".join(map(str, value)) if is_flat else ", ".join(_list_parts(value))
    return ""


def _list_parts(value: Any) -> list[str]:
    """Name clocks with their ranges, and rails with their drivers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [text for each in value for text in _list_parts(each)]
    if not isinstance(value, Mapping) or not (name := value.get("name") or value.get("rail")):
        return []
    ends = [value.get(end) for end in ("min_hz", "max_hz")]
    if all(isinstance(end, int) for end in ends):
        return [f"{name} {format_mhz(ends[0])} to {format_mhz(ends[1])} MHz"]
    return [f"{name} ({value['driver']})" if isinstance(value.get("driver"), str) else str(name)]


@router.post("/boards/{name}/orders")
async def order_board(request: Request, name: str) -> Response:
    """Take an order from the board page's form."""

    def work(store: Store, form: Mapping[str, str], person: Person) -> None:
        orders.order_board(store, name, form.get("order", ""), form.get("reason", "")[:500], person)

    return await take_order(request, f"/boards/{urllib.parse.quote(name, safe='')}", work)


@router.post("/boards/{name}/reservation")
async def reserve_board(request: Request, name: str) -> Response:
    """Reserve a board, or end its reservation, from the page's form."""

    def work(store: Store, form: Mapping[str, str], person: Person) -> None:
        if form.get("order") == "release":
            orders.end_reservation(store, name, "", person)
        else:
            for_s = orders.read_number(form.get("hours", "").strip(), float) * 3600
            orders.reserve_board(store, name, for_s, form.get("why", ""), person)

    return await take_order(request, f"/boards/{urllib.parse.quote(name, safe='')}", work)


async def take_order(request: Request, page: str, work: Callable[[Store, Mapping[str, str], Person], None]) -> Response:
    """Carry out a form's order on a thread, and lead back to its page."""
    form, person = await read_form(request), request.state.person

    def carry_out() -> None:
        with get_view(request).stores.lend() as store:
            work(store, form, person)

    await anyio.to_thread.run_sync(carry_out)
    return RedirectResponse(page, 303)


def read_number(what: str, text: str, command: str) -> int:
    """Read the number of a sweep or result; `command` lists them. Raises UsageError."""
    if not text.isdecimal() or len(text) > 18:
        raise errors.UsageError(f"there is no {what} {text[:40]!r}", f"`{command}` shows those that there are.")
    return int(text)


async def read_form(request: Request) -> dict[str, str]:
    """Read a form's fields; `Guard` has limited its size and time."""
    body = await request.body()
    return dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace"), max_num_fields=20))


@router.get("/records")
def list_records(request: Request, wanted: RecordFilters, page: PageNumber = 1) -> HTMLResponse:
    """Show records, filtered as by `farm record list`."""
    with get_view(request).stores.lend() as store:
        records, total = wanted.fetch_page(store, PER_PAGE, (page - 1) * PER_PAGE)
        # Say so where only records of the other kind exist.
        hint = "" if total else wanted.explain_none(store)
    given = {key: value for key, value in dataclasses.asdict(wanted).items() if value}
    flags = ((f"--{key.replace('_', '-')}", value) for key, value in given.items())
    words = [flag if value is True else f"{flag} {shlex.quote(value)}" for flag, value in flags]
    asked = urllib.parse.urlencode({key: "true" if value is True else value for key, value in given.items()})
    return show(
        request,
        "records.html",
        records=records,
        turning=turn(request, page, total, PER_PAGE),
        filters=wanted,
        hint=hint.partition(":")[0],
        api=f"/api/v1/records?{asked}",
        command=" ".join(["farm record list", *words]),
        export=" ".join(["farm record export records", *words]),
    )


@router.get("/records/{workload}")
def show_record(request: Request, workload: str) -> HTMLResponse:
    """Show a workload's records, and its best trials by place."""
    with get_view(request).stores.lend() as store:
        key, name = require_workload(store, workload)
        about = store.workloads.fetch_by_hash([key])[key]
        records = store.records.fetch(workloads=[key], simulated=None)
        best = [
            (place, point, simulated, store.records.fetch_best_trials(key, place, point, simulated=simulated, limit=5))
            for simulated in (False, True)
            for place, point in store.records.fetch_operating_points(key, simulated=simulated)[:20]
        ]
    return show(
        request,
        "record.html",
        about=about,
        name=name,
        records=sorted(records, key=lambda each: each.median_s),
        best=best,
        command=f"farm record show {key}",
    )


@router.get("/artifacts")
def list_artifacts(request: Request, chosen: WantedArtifacts, page: PageNumber = 1) -> HTMLResponse:
    """Show what was compiled on this machine, and what campaigns can compile."""
    view = get_view(request)
    with view.stores.lend() as store:
        campaigns, total = store.campaigns.fetch_page(PER_PAGE, (page - 1) * PER_PAGE)
    packages: dict[str, tuple[str, int]] = {}
    pending = []
    for campaign in campaigns:
        made = artifacts.list_made(campaign)
        packages |= {each["folder"]: (campaign.name, index) for index, each in enumerate(made) if each["package"]}
        names = {each["name"] for each in made}
        wanted = [
            each
            for each in artifact_folder.list_artifacts(campaign_document.summarise(campaign))
            if each.name not in names
        ]
        pending += [{"campaign": campaign.name, "wanted": each} for each in wanted]
    made_here = chosen.choose(artifact_folder.list_made_here(view.settings.home_path))
    rows = [(artifact_folder.to_document(each), packages.get(str(each.folder))) for each in made_here]
    return show(
        request,
        "artifacts.html",
        rows=rows,
        chosen=chosen,
        pending=pending,
        turning=turn(request, page, total, PER_PAGE),
        command="farm model artifacts",
    )


@router.get("/artifacts/{campaign}/{index}")
def download_artifact(request: Request, campaign: str, index: int) -> Response:
    """Send the package of a campaign: only a path that the store names."""
    with get_view(request).stores.lend() as store:
        made = artifacts.list_made(store.campaigns.require(campaign))
    package = made[index]["package"] if 0 <= index < len(made) else None
    if not package or not Path(package).is_file():
        raise errors.UsageError(f"there is no package {index} of campaign {campaign!r} on this machine")
    return FileResponse(package, filename=Path(package).name)


@router.get("/sign-in")
def show_sign_in(request: Request, to: Text = "/") -> HTMLResponse:
    """Show the form for the token."""
    return show(request, "sign_in.html", to=_keep_here(to), command="farm web token")


@router.post("/sign-in")
async def sign_in(request: Request) -> Response:
    """Exchange the token for a cookie that no script and no other site reads."""
    form, access = await read_form(request), get_view(request).access
    session = access.open_session(form.get("token", ""))
    answer = RedirectResponse(_keep_here(form.get("to", "/")), 303)
    answer.set_cookie(COOKIE, session, max_age=_COOKIE_S, httponly=True, samesite="strict", secure=access.secure)
    return answer


@router.post("/sign-out")
async def sign_out(request: Request) -> Response:
    """Delete the cookie."""
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(COOKIE)
    return answer


def _keep_here(to: str) -> str:
    """Return a path of this site: signing in redirects nowhere else."""
    return to if to.startswith("/") and not to.startswith(("//", "/\\")) and to.isprintable() else "/"


@router.get("/healthz")
def show_health() -> JSONResponse:
    """Answer a health check of the server itself."""
    return JSONResponse({"ok": True})
