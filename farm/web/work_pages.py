"""The pages of campaigns and sweeps: their routes, and what their templates show."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from farm.errors import UsageError
from farm.inventory import board_types
from farm.points.values import WALL, Goal, Objective
from farm.report import campaign_rows, sweep_page
from farm.report.campaign_document import TaskId, draw_curves, fetch_winners
from farm.report.sweep_page import pair_variants
from farm.store import Store
from farm.sweep import rows as sweep_rows
from farm.sweep import stored
from farm.sweep.export import chosen as exporting
from farm.sweep.export import compare
from farm.types import campaigns
from farm.web import charts, now, orders
from farm.web.access import Person
from farm.web.pages import PER_PAGE, PageNumber, get_view, read_number, show, take_order, turn
from farm.web.series import Course
from farm.web.view import Text, View

router = APIRouter(include_in_schema=False)

# How the reasons begin of gaps in which no board was to work.
_PAUSES = ("paused", "interrupted")
# The most that one chart shows, the busiest first; and bars.
_MOST_LANES, _BARS, _MOST_CURVES = 60, 160, 8
# A gap of a board is shown from this share of a campaign's time on.
_GAP_SHARE = 0.015
# The period where only its objective is chosen: a camera's.
_CAMERA_S = 1 / 30
SweepNumber = Annotated[int, Path(ge=0, le=2**63 - 1)]


@router.get("/campaigns")
def list_campaigns(request: Request, page: PageNumber = 1) -> HTMLResponse:
    """Show campaigns, the newest first."""
    with get_view(request).stores.lend() as store:
        campaigns, total = store.campaigns.fetch_page(PER_PAGE, (page - 1) * PER_PAGE)
        boards = store.boards.fetch() if any(not each.over for each in campaigns) else []
    return show(
        request,
        "campaigns.html",
        campaigns=[now.to_campaign_row(each, boards) for each in campaigns],
        turning=turn(request, page, total, PER_PAGE),
        command="farm campaign list",
    )


@router.get("/campaigns/{name}")
def show_campaign(request: Request, name: str, beside: Text = "") -> HTMLResponse:
    """Show a campaign: progress, results, and who measured when; and another one beside it."""
    view = get_view(request)
    with view.stores.lend() as store:
        campaign = store.campaigns.require(name)
        boards = [] if campaign.over else store.boards.fetch()
        winners = fetch_winners(store, campaign)
        progress = campaign.progress or {}
        with view.courses.read(store, campaign.id) as course:
            curves = draw_curves(campaign.order, course.gains)
            pace, minutes = course.pace(_BARS)
            lanes, left_out = _list_lanes(store, campaign, course)
            tasks = list(_list_tasks(progress, course))
            counted, began, ended = course.counted, course.began, course.ended
            best_s = dict(course.best_s)
        other = store.campaigns.require(beside) if beside else None
        both, others = _compare_campaigns(view, store, best_s, other) if other else ([], [])
        choices = [each.name for each in store.campaigns.fetch_page(PER_PAGE, 0)[0] if each.name != name]
    lines = [
        (_name_curve(each, curves), [(at, s * 1e3) for at, s in each["steps"]]) for each in curves if each["steps"]
    ]
    lines = lines[: _MOST_CURVES // 2] + others[: _MOST_CURVES // 2] if others else lines[:_MOST_CURVES]
    course_chart = charts.plan_course(lines, max([counted, *(steps[-1][0] for _, steps in others)]))
    return show(
        request,
        "campaign.html",
        row=now.to_campaign_row(campaign, boards),
        groups=campaign_rows.list_groups({**progress, "tasks": tasks}),
        finals=[campaign_rows.describe_final(each) for each in campaign_rows.list_finals(progress)],
        winners=[each for each in winners if each["median_s"] is not None],
        tasks=len(winners),
        best={(each["board_type"], each["point"], each["workload"]): each for each in tasks},
        course=charts.show(course_chart) if lines else "",
        plot=json.dumps(charts.to_plot(course_chart)),
        pace=charts.show(charts.plan_pace(pace, minutes)) if len(pace) > 1 else "",
        lanes=lanes,
        began=began,
        ended=ended,
        left_out=left_out,
        gaps=_sum_gaps(lanes),
        events=now.list_events(store, name, PER_PAGE),
        budget=orders.list_fields(campaign),
        both=both,
        beside=beside,
        choices=choices,
        submitted=f"farm {campaign.command}",
        command=f"farm campaign show {shlex.quote(name)}",
    )


def _compare_campaigns(
    view: View, store: Store, best_s: Mapping[TaskId, float], other: campaigns.FleetCampaign
) -> tuple[list[tuple[str, TaskId, float, float]], list[tuple[str, list[tuple[float, float]]]]]:
    """Return tasks of both with their best latencies (s), the greatest gain first, and the other one's curves (ms)."""
    with view.courses.read(store, other.id) as course:
        theirs, curves = dict(course.best_s), draw_curves(other.order, course.gains)
    names = {each.hash: each.name for kind in other.order.types for each in kind.workloads}
    common = [(names.get(task[2], task[2]), task, best_s[task], theirs[task]) for task in theirs if task in best_s]
    lines = [
        (f"{other.name}: {_name_curve(each, curves)}", [(at, s * 1e3) for at, s in each["steps"]])
        for each in curves
        if each["steps"]
    ]
    return sorted(common, key=lambda each: each[3] / each[2]), lines


def _list_tasks(progress: Mapping[str, Any], course: Course) -> Iterator[dict[str, Any]]:
    """Return the tasks of a campaign's progress, each with its history of best latencies."""
    steps: dict[Any, list[tuple[float, float]]] = {}
    for counted, key, median_s in course.gains:
        steps.setdefault(key, []).append((counted, median_s))
    for task in progress.get("tasks", ()):
        mine = steps.get((task["board_type"], task["point"], task["workload"]), [])
        yield {
            **task,
            "spark": _draw_spark(mine, course.counted),
            "steps": len(mine),
            "first_s": mine[0][1] if mine else None,
        }


def _draw_spark(steps: Sequence[tuple[float, float]], end: float) -> str:
    """Return the path of a latency that falls, in a box of 120 by 22; empty for a single value."""
    if len(steps) < 2:
        return ""
    high, low = math.log(steps[0][1]), math.log(steps[-1][1])
    places = [(1 + 118 * at / end, 2 + 18 * (high - math.log(value)) / (high - low)) for at, value in steps]
    first, *others = places
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in others) + "H119"


def _name_curve(curve: Mapping[str, Any], curves: Sequence[Mapping[str, Any]]) -> str:
    several = len({(each["board_type"], each["point"]) for each in curves}) > 1
    return f"{curve['model']} on {curve['board_type']} @ {curve['point']}" if several else str(curve["model"])


@dataclasses.dataclass(frozen=True)
class Lane:
    """A board's lane in a timeline: its work, its gaps with their cause, and pauses (all s since the epoch)."""

    name: str
    spans: Sequence[Sequence[float]]
    gaps: Sequence[tuple[float, float, str]]
    pauses: Sequence[tuple[float, float, str]]


def _list_lanes(store: Store, campaign: campaigns.FleetCampaign, course: Course) -> tuple[list[Lane], int]:
    """Return a lane for each board, the busiest where there are too many; and how many are left out."""
    names = sorted(course.boards, key=lambda name: -course.boards[name].held_s)[:_MOST_LANES]
    until = course.ended if campaign.over else max(course.ended, min(time.time(), course.ended + 3600))
    least_s = max(5.0, _GAP_SHARE * (until - course.began))
    gaps = {name: course.boards[name].list_gaps(least_s, until) for name in names}
    explained = _explain_gaps(store, campaign, {name: found for name, found in gaps.items() if found})
    lanes = []
    for name in sorted(names):
        found = explained.get(name, [])
        pauses = [each for each in found if each[2].startswith(_PAUSES)]
        lanes.append(Lane(name, course.boards[name].spans, [each for each in found if each not in pauses], pauses))
    return lanes, len(course.boards) - len(names)


def _explain_gaps(
    store: Store, campaign: campaigns.FleetCampaign, gaps: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, list[tuple[float, float, str]]]:
    """Explain each gap of a board by a pause of the campaign, else by what happened to the board or the campaign."""
    if not gaps:
        return {}
    first = min(start for found in gaps.values() for start, _ in found)
    last = max(end for found in gaps.values() for _, end in found)
    told: dict[str, list[tuple[float, str]]] = {}
    for row in store.events.fetch_board_gaps(gaps, first - 5.0, last):
        if row.kind not in ("probe_passed", "lease_expired"):
            why = row.reason or str(row.kind).replace("_", " ")
            told.setdefault(row.board, []).append((row.at, why))
    own = [
        (row.at, row.kind.removeprefix("campaign_").replace("_", " ") + f": {row.message}")
        for row in store.events.fetch_newest(PER_PAGE, campaign.name)
        if row.kind in ("campaign_paused", "campaign_interrupted", "campaign_waiting", "campaign_verifying")
    ]
    explained = {}
    for board, found in gaps.items():
        mine = [*(each for each in own if each[1].startswith(_PAUSES)), *told.get(board, []), *own]
        explained[board] = [
            (start, end, next((why for at, why in mine if start - 5.0 <= at <= end), "no candidate was ready"))
            for start, end in found
        ]
    return explained


def _sum_gaps(lanes: Sequence[Lane]) -> list[tuple[str, int, float]]:
    """Sum up by cause: number of gaps and their length together (s); the longest first."""
    causes: dict[str, tuple[int, float]] = {}
    for lane in lanes:
        for start, end, why in lane.gaps:
            count, seconds = causes.get(why, (0, 0.0))
            causes[why] = (count + 1, seconds + end - start)
    found = [(why, count, seconds) for why, (count, seconds) in causes.items()]
    return sorted(found, key=lambda each: -each[2])[:8]


@router.post("/campaigns/{name}/orders")
async def order_campaign(request: Request, name: str) -> Response:
    """Take an order from the campaign page's form."""

    def work(store: Store, form: Mapping[str, str], person: Person) -> None:
        if form.get("order") == "budget":
            orders.change_budget(store, name, orders.read_budget(form), person)
        else:
            orders.order_campaign(get_view(request).settings, store, name, form.get("order", ""), person)

    return await take_order(request, f"/campaigns/{urllib.parse.quote(name, safe='')}", work)


@router.get("/sweeps")
def list_sweeps(request: Request, page: PageNumber = 1) -> HTMLResponse:
    """Show sweeps, the newest first."""
    with get_view(request).stores.lend() as store:
        rows, total = store.sweeps.fetch_page(PER_PAGE, (page - 1) * PER_PAGE)
        sweeps = store.session.read_each("the sweep", rows, stored.summarise)
    return show(
        request,
        "sweeps.html",
        sweeps=sweeps,
        turning=turn(request, page, total, PER_PAGE),
        command="farm sweep list",
    )


@router.get("/sweeps/{sweep}")
def show_sweep(
    request: Request,
    sweep: SweepNumber,
    deadline: Text = "",
    max_power: Text = "",
    objective: Text = "",
    period: Text = "",
    beside: Text = "",
) -> HTMLResponse:
    """Show a sweep, its pick for the given limits, and another sweep beside it."""
    view = get_view(request)
    with view.stores.lend() as store:
        own = stored.goal_from_dict(store.sweeps.require(sweep).goal)
        goal = read_goal(own, deadline, max_power, objective, period)
        document = view.sweeps.find(store, sweep, goal)
        other = view.sweeps.find(store, read_number("sweep", beside, "farm sweep list")) if beside else None
        rows = [row for row in store.sweeps.fetch_page(PER_PAGE, 0)[0] if row.id != sweep]
        # Simulated figures and measured ones say nothing about each other.
        alike = [row for row in rows if row.simulated == document["board"]["simulated"]]
        choices = store.session.read_each("the sweep", alike, stored.summarise)
    has_points = any(row["energy_j"] for series in document["series"] for row in sweep_rows.counted(series))
    has_wall = any(row["wall_power_w"] for series in document["series"] for row in series["rows"])
    latest = f"{goal.deadline_s * 1e3:.6g}ms" if goal.deadline_s else "none"
    most = f"{goal.max_power_w:.6g}W" if goal.max_power_w else "none"
    least = f"--period {goal.period_s * 1e3:.6g}ms" if goal.period_s else f"--objective {goal.aim}"
    return show(
        request,
        "sweep.html",
        document=document,
        other=other,
        choices=choices,
        beside=beside,
        answers=sweep_page.write_answers(document),
        goal=goal,
        said_goal=sweep_rows.describe_goal(document["goal"]),
        objectives=[mark + each for mark in ("", *[WALL] * has_wall) for each in Objective],
        scatter=charts.show(charts.plan_scatter(document, other)) if has_points else "",
        compared=sweep_page.compare_variants(document),
        pairs=pair_variants(document),
        series=sweep_rows.order_series(document),
        ends=_find_ends(document),
        points=json.dumps(_to_points(document)),
        both=_compare(document, other),
        command=f"farm sweep pick {sweep} --deadline {latest} --max-power {most} {least}",
        export=f"farm sweep export {sweep} --as sh",
    )


def read_goal(own: Goal, deadline: str, max_power: str, objective: str, period: str) -> Goal:
    """Return the sweep's own goal with the given limits: milliseconds and watts; 0 removes one. Raises UsageError.

    A form has all fields: the period counts for its objective, and a slider beyond it is no limit.
    """
    period_s = _read_limit("period", period, own.period_s, 1e-3)
    if objective.endswith(Objective.PERIOD):
        period_s = period_s or _CAMERA_S
    goal = own.settle(objective, None, _read_limit("max_power", max_power, own.max_power_w, 1.0), period_s, asked=False)
    deadline_s = _read_limit("deadline", deadline, own.deadline_s, 1e-3)
    late = deadline_s and goal.period_s and deadline_s > goal.period_s
    return goal if late else dataclasses.replace(goal, deadline_s=deadline_s)


def _read_limit(what: str, text: str, own: float | None, factor: float) -> float | None:
    if not text.strip():
        return own
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise UsageError(
            f"{what} {text[:40]!r} is no number", "deadline and period are in ms, max_power in W; 0: no limit."
        )
    return value * factor or None


def _find_ends(document: Mapping[str, Any]) -> dict[str, tuple[float, float] | None]:
    """Return the ranges of the sliders of deadline (ms) and power (W)."""
    rows = [row for series in document["series"] for row in sweep_rows.measured(series)]
    times = [row["latency_s"]["high"] * 1e3 for row in rows]
    powers = [row["power_w"]["high"] for row in rows if row["power_w"]]
    return {
        "deadline": (min(times) * 0.95, max(times) * 1.02) if times else None,
        "max_power": (min(powers) * 0.95, max(powers) * 1.02) if powers else None,
    }


def _to_points(document: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return for each series what `fit.pick` chooses by, so that a slider moves the pick at once."""
    watts = "wall_power_w" if document["goal"]["wall"] else "power_w"
    return [
        [
            {
                "key": row["key"],
                "latency": row["latency_s"]["high"] * 1e3,
                "power": row[watts] and row[watts]["high"],
                "cost": row["objective"],
            }
            for row in sweep_rows.measured(series)
            if sweep_rows.keeps_metrics(row, document["goal"])
            if row["objective"] and (not row["period"] or row["latency_s"]["high"] <= row["period"]["period_s"])
        ]
        for series in document["series"]
    ]


def _compare(document: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Compare two sweeps at the points that both measured; none where they have none in common.

    Raises UsageError where one of them is simulated and the other is not.
    """
    if other is None:
        return []
    compare.refuse_mixture(document, other)
    try:
        pairs = compare.compare_sweeps(document, other)
    except UsageError:
        return []
    return [{"one": pair.one, "other": pair.other, "points": pair.points, "left_out": pair.left_out} for pair in pairs]


@router.get("/sweeps/{sweep}/export")
def export_sweep(request: Request, sweep: SweepNumber, form: Text = "json") -> Response:
    """Send a sweep's pick as a file for a board: `json`, `sh` or `nvpmodel`; `document` is the whole sweep."""
    view = get_view(request)
    with view.stores.lend() as store:
        document = view.sweeps.find(store, sweep)
    if not document["series"]:
        raise UsageError(f"there is no pick of sweep {sweep}: nothing is measured yet")
    board_type = board_types.require_board_type(document["board"]["type"])
    point = exporting.choose_point(document, sweep_rows.order_series(document)[0])
    if form not in exporting.WRITERS:
        raise UsageError(f"a sweep is not exported as {form[:40]!r}", f"It is as {', '.join(exporting.WRITERS)}.")
    suffix = {"nvpmodel": "conf"}.get(form, form)
    headers = {"content-disposition": f'attachment; filename="sweep-{sweep}.{suffix}"'}
    return PlainTextResponse(exporting.WRITERS[form](point, board_type), headers=headers)
