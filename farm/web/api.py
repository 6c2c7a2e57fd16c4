"""REST under `/api/v1`: the documents that `--json` prints, page by page, and orders."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse

from farm.artifacts import artifact_folder
from farm.crew import queue_entry
from farm.crew.calibration import fetch_calibration
from farm.crew.calibration import to_document as to_board_document
from farm.errors import UsageError
from farm.report.campaign_document import make_document, shorten
from farm.report.record_document import make_document as make_workload_document
from farm.report.record_document import name_codes, require_workload
from farm.report.record_document import to_document as to_record_document
from farm.store.standing import BoardFilters
from farm.sweep import stored
from farm.types import campaigns, documents
from farm.web import orders
from farm.web.access import Person
from farm.web.pages import get_view
from farm.web.view import RecordFilters, Text, WantedArtifacts
from farm.web.work_pages import read_goal

PREFIX = "/api/v1"
MOST = 500
_MOST_ROWS = 2**31

Limit = Annotated[int, Query(ge=1, le=MOST, description="Number of entries.")]
Offset = Annotated[int, Query(ge=0, le=_MOST_ROWS, description="Entries to skip.")]
Number = Annotated[int, Path(ge=0, le=2**63 - 1)]
Name = Annotated[str, Path(max_length=500)]

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": documents.Problem, "description": said}
    for status, said in ((404, "There is none."), (422, "The request is wrong."), (503, "The farm is not there."))
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": documents.Problem, "description": "The token is missing or wrong."},
    403: {"model": documents.Problem, "description": "The token's role is not enough, or another site's page asked."},
}


def _refuse_unknown(request: Request) -> None:
    """Refuse parameters that the route does not take. Raises UsageError."""
    route = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = [each["name"] for each in route.get("parameters", ()) if each["in"] == "query"]
    if unknown := sorted(set(request.query_params) - set(known)):
        raise UsageError(f"the parameter {unknown[0]} is unknown", f"Known: {', '.join(known) or 'none'}.")


router = APIRouter(prefix=PREFIX, responses=_PROBLEMS, dependencies=[Depends(_refuse_unknown)])


def _who(request: Request) -> Person:
    person: Person = request.state.person
    return person


def _answer(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model}}


def _show(model: pydantic.BaseModel) -> JSONResponse:
    return JSONResponse(model.model_dump(mode="json"))


def _find_next(request: Request, shown: int, total: int, limit: int, offset: int) -> str | None:
    query = {**request.query_params, "limit": str(limit), "offset": str(offset + shown)}
    return f"{request.url.path}?{urllib.parse.urlencode(query)}" if shown and offset + shown < total else None


def _page(request: Request, items: Sequence[Any], total: int, limit: int, offset: int) -> JSONResponse:
    next_ = _find_next(request, len(items), total, limit, offset)
    return JSONResponse(jsonable_encoder({"total": total, "next": next_, "items": list(items)}))


@router.get("/boards", responses=_answer(documents.BoardPage))
def list_boards(
    request: Request, board_type: Text = "", state: Text = "", label: Text = "", limit: Limit = 100, offset: Offset = 0
) -> JSONResponse:
    """List boards by name, filtered as by `farm board list --json`; `label` is KEY=VALUE."""
    key, _, value = label.partition("=")
    wanted = BoardFilters(board_type=board_type, state=state, labels={key: value} if label else {})
    with get_view(request).stores.lend() as store:
        found = list(filter(wanted.matches, store.boards.fetch()))
    return _page(request, found[offset : offset + limit], len(found), limit, offset)


@router.get("/boards/{name}", responses=_answer(documents.BoardInFull))
def show_board(request: Request, name: Name) -> JSONResponse:
    """Show a board with its golden kernel and its events, as `farm board show --json` does."""
    with get_view(request).stores.lend() as store:
        board = store.boards.require(name)
        calibration = fetch_calibration(store, board)
        return _show(to_board_document(board, calibration, store.events.fetch_of_boards(name)))


@router.post("/boards/{name}/reservation", responses=_answer(documents.BoardInfo) | _REFUSALS)
def reserve_board(request: Request, name: Name, body: documents.Reservation) -> JSONResponse:
    """Reserve a board for the caller, or prolong the caller's reservation."""
    with get_view(request).stores.lend() as store:
        return _show(orders.reserve_board(store, name, body.for_s, body.why, _who(request)))


@router.delete("/boards/{name}/reservation", responses=_answer(documents.BoardInfo) | _REFUSALS)
def end_reservation(
    request: Request, name: Name, reason: Annotated[str, Query(max_length=500, description="Why.")] = ""
) -> JSONResponse:
    """End the caller's reservation early; an operator can end any."""
    with get_view(request).stores.lend() as store:
        return _show(orders.end_reservation(store, name, reason, _who(request)))


@router.post("/boards/{name}/{order}", responses=_answer(documents.BoardInfo) | _REFUSALS)
def order_board(request: Request, name: Name, order: Name, body: documents.BoardOrder) -> JSONResponse:
    """`drain`, `undrain`, `quarantine` or `clear` a board."""
    with get_view(request).stores.lend() as store:
        return _show(orders.order_board(store, name, order, body.reason, _who(request)))


@router.get("/campaigns", responses=_answer(campaigns.CampaignPage))
def list_campaigns(request: Request, limit: Limit = 50, offset: Offset = 0) -> JSONResponse:
    """List campaigns, the newest first, as `farm campaign list --json` does."""
    with get_view(request).stores.lend() as store:
        campaigns, total = store.campaigns.fetch_page(limit, offset)
    return _page(request, [shorten(each) for each in campaigns], total, limit, offset)


@router.post("/campaigns", responses=_answer(campaigns.CampaignInfo) | _REFUSALS)
def submit_campaign(request: Request, body: dict[str, Any]) -> JSONResponse:
    """Submit a campaign: the keys of a campaign file, with models of the zoo. The answer comes once it is planned."""
    view = get_view(request)
    with view.stores.lend() as store:
        return JSONResponse(shorten(orders.submit_campaign(view.settings, store, body, _who(request))))


@router.get("/campaigns/{name}", responses=_answer(campaigns.CampaignInFull))
def show_campaign(request: Request, name: Name) -> JSONResponse:
    """Show a campaign with its results, as `farm campaign show --json` does."""
    with get_view(request).stores.lend() as store:
        return JSONResponse(make_document(store, name))


@router.post("/campaigns/{name}/{order}", responses=_answer(campaigns.CampaignInfo) | _REFUSALS)
def order_campaign(request: Request, name: Name, order: Name) -> JSONResponse:
    """`pause`, `resume` or `cancel` a campaign."""
    view = get_view(request)
    with view.stores.lend() as store:
        return JSONResponse(shorten(orders.order_campaign(view.settings, store, name, order, _who(request))))


@router.patch("/campaigns/{name}/budget", responses=_answer(campaigns.CampaignInfo) | _REFUSALS)
def change_budget(request: Request, name: Name, body: campaigns.BudgetChange) -> JSONResponse:
    """Change limits of a campaign that is not over."""
    with get_view(request).stores.lend() as store:
        changes = body.model_dump(exclude_unset=True)
        return JSONResponse(shorten(orders.change_budget(store, name, changes, _who(request))))


@router.get("/sweeps", responses=_answer(documents.SweepPage))
def list_sweeps(request: Request, limit: Limit = 50, offset: Offset = 0) -> JSONResponse:
    """List sweeps, the newest first, as `farm sweep list --json` does."""
    with get_view(request).stores.lend() as store:
        rows, total = store.sweeps.fetch_page(limit, offset)
        found = store.session.read_each("the sweep", rows, stored.summarise)
    return _page(request, found, total, limit, offset)


@router.get("/sweeps/{sweep}", responses=_answer(documents.SweepInFull))
def show_sweep(
    request: Request, sweep: Number, deadline: Text = "", max_power: Text = "", objective: Text = "", period: Text = ""
) -> JSONResponse:
    """Show a sweep, its points and picks, as `farm sweep show --json` does; for other limits, in ms and W, if given."""
    view = get_view(request)
    with view.stores.lend() as store:
        own = stored.goal_from_dict(store.sweeps.require(sweep).goal)
        return JSONResponse(view.sweeps.find(store, sweep, read_goal(own, deadline, max_power, objective, period)))


@router.get("/records", responses=_answer(documents.RecordPage))
def list_records(request: Request, wanted: RecordFilters, limit: Limit = 100, offset: Offset = 0) -> JSONResponse:
    """List records, filtered as by `farm record list --json`."""
    with get_view(request).stores.lend() as store:
        shown, total = wanted.fetch_page(store, limit, offset)
        codes = name_codes(store, shown)
    items = [to_record_document(each, codes).model_dump(mode="json") for each in shown]
    return _page(request, items, total, limit, offset)


@router.get("/records/{workload}")
def show_record(request: Request, workload: Name) -> documents.WorkloadRecords:
    """Show all records of a workload, as `farm record show --json` does."""
    with get_view(request).stores.lend() as store:
        key, _ = require_workload(store, workload)
        about = store.workloads.fetch_by_hash([key])[key]
        records = store.records.fetch(workloads=[key], simulated=None)
        return make_workload_document(about, records, name_codes(store, records))


@router.get("/artifacts", responses=_answer(documents.ArtifactPage))
def list_artifacts(request: Request, wanted: WantedArtifacts, limit: Limit = 100, offset: Offset = 0) -> JSONResponse:
    """List artifacts of this machine, the newest first, each as `farm model artifacts --json` has it."""
    found = wanted.choose(artifact_folder.list_made_here(get_view(request).settings.home_path))
    items = [artifact_folder.to_document(each) for each in found[offset : offset + limit]]
    return _page(request, items, len(found), limit, offset)


@router.get("/results", responses=_answer(documents.ResultPage))
def list_results(
    request: Request, kind: Text = "", model: Text = "", board_type: Text = "", limit: Limit = 50, offset: Offset = 0
) -> JSONResponse:
    """List kept results, the newest first, filtered as by `farm result list --json`."""
    wanted = {"kind": kind, "model": model, "board_type": board_type}
    with get_view(request).stores.lend() as store:
        found, total = store.results.fetch(**wanted, limit=limit, offset=offset), store.results.count(**wanted)
    return _page(request, [each._asdict() for each in found], total, limit, offset)


@router.get("/results/{result}", responses=_answer(documents.ResultInfo))
def show_result(request: Request, result: Number) -> JSONResponse:
    """Show a kept result, as its command printed it."""
    with get_view(request).stores.lend() as store:
        return JSONResponse(jsonable_encoder(store.results.require(result)._asdict()))


@router.get("/queue", responses=_answer(documents.Queue))
def show_queue(request: Request) -> JSONResponse:
    """Show the queue for boards, as `farm queue --json` does."""
    with get_view(request).stores.lend() as store:
        return JSONResponse(queue_entry.to_document(store))


@router.get("/events", responses=_answer(documents.EventList))
def list_events(request: Request, subject: Text = "", limit: Limit = 20, offset: Offset = 0) -> JSONResponse:
    """List the newest events, of all or of one board or campaign."""
    with get_view(request).stores.lend() as store:
        found = store.events.fetch_newest(limit + 1, subject or None, offset)
    shown = found[:limit]
    return _show(
        documents.EventList(next=_find_next(request, len(shown), offset + len(found), limit, offset), items=shown)
    )
