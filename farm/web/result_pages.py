"""The pages of kept results: their list, the matrix, and two results side by side."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from farm.report import matrix, results
from farm.web import charts
from farm.web.pages import PER_PAGE, PageNumber, get_view, read_number, show, turn
from farm.web.view import Text

router = APIRouter(include_in_schema=False)

# Results that the matrix is made of, the newest.
_NEWEST = 1000


@router.get("/results")
def list_results(request: Request, page: PageNumber = 1) -> HTMLResponse:
    """Show the gains over rivals, and results, the newest first."""
    with get_view(request).stores.lend() as store:
        newest = store.results.fetch(limit=_NEWEST)
        shown = store.results.fetch(limit=PER_PAGE, offset=(page - 1) * PER_PAGE) if page > 1 else newest[:PER_PAGE]
        total = store.results.count()
    cells = matrix.make_matrix(newest)
    chart = matrix.plan_chart(cells)
    return show(
        request,
        "results.html",
        results=[(each, results.list_figures(each)) for each in shown],
        chart=charts.show(chart) if chart else "",
        headline=chart.headline if chart else "",
        doubts=matrix.say_doubts(cells),
        turning=turn(request, page, total, PER_PAGE),
        command="farm result matrix --out matrix",
    )


@router.get("/results/compare")
def compare_results(request: Request, one: Text = "", other: Text = "", mixed: bool = False) -> HTMLResponse:
    """Show two results side by side."""
    with get_view(request).stores.lend() as store:
        first, second = (
            store.results.require(read_number("result", text, "farm result list")) for text in (one, other)
        )
    return show(
        request,
        "result_pair.html",
        one=first,
        other=second,
        changes=results.compare(first, second, mixed=mixed),
        differences=results.list_differences(first, second),
        command=f"farm result show {first.id} {second.id}{' --mixed' if mixed else ''}",
    )
