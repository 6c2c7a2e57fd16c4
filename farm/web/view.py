"""What the routes share: stores, data kept in memory beside them, and templates."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jinja2
import markupsafe
from fastapi import Depends, Query

from farm import foreign, units
from farm.artifacts.artifact_folder import ArtifactFilters
from farm.inventory.board_types import describe_watts
from farm.points.values import Goal
from farm.report import campaign_rows
from farm.report.record_document import Filters
from farm.settings import Settings, StoreLocation
from farm.store import Store
from farm.store.events import OverviewMark
from farm.sweep import stored
from farm.sweep.export.document import make_document
from farm.types import campaigns
from farm.web import now
from farm.web.access import Access
from farm.web.live import LiveBoards, Part
from farm.web.now import KnownOfBoards
from farm.web.series import Courses, Gauges, GoldenRuns

Text = Annotated[str, Query(max_length=500)]
T = TypeVar("T")
_KEPT = 64
_FOLDER = Path(__file__).parent
# Events of boards after which their golden kernel's history begins anew.
_NEW_HISTORY = ("replaced", "removed")
# A running campaign saves its progress once a second; a page need not follow each.
_CAMPAIGNS_PERIOD_S = 1.0


def _read_query(group: Callable[..., T]) -> Callable[..., T]:
    """Return a dependency that reads a dataclass of texts and flags from a request's query."""

    def read(**given: Any) -> T:
        return group(**given)

    kind = inspect.Parameter.KEYWORD_ONLY
    read.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(each.name, kind, default=each.default, annotation=Text if each.default == "" else bool)
            for each in inspect.signature(group).parameters.values()
        ]
    )
    return read


RecordFilters = Annotated[Filters, Depends(_read_query(Filters))]
WantedArtifacts = Annotated[ArtifactFilters, Depends(_read_query(ArtifactFilters))]


class SweepDocuments:
    """Keeps the documents of the latest sweeps. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[tuple[Any, ...], dict[str, Any]] = collections.OrderedDict()

    def find(self, store: Store, sweep: int, goal: Goal | None = None) -> dict[str, Any]:
        """Return a sweep's document, its picks for its own goal or `goal`. Raises UsageError where there is none."""
        row = store.sweeps.require(sweep)
        goal = goal or stored.goal_from_dict(row.goal)
        key = (sweep, row.state, row.visits, row.finished_at, goal)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        document = make_document(store, sweep, goal)
        with self._lock:
            self._kept[key] = document
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return document


class Stores:
    """Lends stores of one database. Thread-safe; it holds as many as were lent at once."""

    def __init__(self, location: StoreLocation) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._free: list[Store] = []

    @contextlib.contextmanager
    def lend(self) -> Iterator[Store]:
        """Lend a store for the block. Raises what opening one raises."""
        with self._lock:
            store = self._free.pop() if self._free else None
        store = store or Store(self._location)
        try:
            yield store
        finally:
            with self._lock:
                self._free.append(store)

    def close(self) -> None:
        """Close the stores that are not lent."""
        with self._lock:
            free, self._free = self._free, []
        for store in free:
            store.close()


class View:
    """What the routes share. Thread-safe, except `look`, which the hub alone calls."""

    def __init__(self, settings: Settings, access: Access) -> None:
        self.settings, self.access = settings, access
        self.stores = Stores(settings.store_location)
        self.golden, self.gauges, self.live = GoldenRuns(), Gauges(), LiveBoards(settings.home_path)
        self.courses, self.sweeps = Courses(), SweepDocuments()
        self._mark: OverviewMark | None = None
        self._campaigns_at = 0.0
        self._campaigns: dict[str, str] = {}

    def learn(self, store: Store) -> OverviewMark:
        """Read what is new in the store into memory."""
        mark = store.events.fetch_overview_mark()
        self.golden.update(store)
        self.gauges.update(store, mark.trial)
        return mark

    def warm(self) -> None:
        """Read at the start what the first page needs: golden kernels and running campaigns."""
        with self.stores.lend() as store:
            self.learn(store)
            for campaign in store.campaigns.fetch(over=False):
                with self.courses.read(store, campaign.id):
                    pass

    def find_known(self, store: Store, campaigns: Sequence[campaigns.FleetCampaign]) -> KnownOfBoards:
        """Return facts about boards beside their rows; `campaigns` are the running ones."""
        faults = store.events.fetch_last_faults(now.FAULTS)
        return KnownOfBoards(self.golden, self.gauges, faults, now.list_points(campaigns, time.time()))

    # Live updates

    def look(self) -> Sequence[Part]:
        """Return the pieces of pages that changed since the last call."""
        with self.stores.lend() as store:
            before, mark = self._mark, self.learn(store)
            self._mark = mark
            if before is None:
                return ()
            parts: list[Part] = []
            if mark.board_event != before.board_event:
                parts += self._list_board_parts(store, before)
            if (mark.event, mark.board_event) != (before.event, before.board_event):
                parts.append(("events", self.render("parts.html", "events", now.list_events(store))))
            if mark.event != before.event or time.monotonic() - self._campaigns_at > _CAMPAIGNS_PERIOD_S:
                self._campaigns_at = time.monotonic()
                parts += self._list_campaign_parts(store)
            return parts

    def _list_board_parts(self, store: Store, before: OverviewMark) -> list[Part]:
        names = store.events.fetch_changed_boards(before.board_event)
        for event in store.events.fetch_board_news(before.board_event, _NEW_HISTORY):
            self.golden.forget(event.board)
        known = self.find_known(store, store.campaigns.fetch(over=False))
        rows = [now.to_board_row(board, known, time.time()) for board in store.boards.fetch_some(names)]
        parts = [(f"board-{row['name']}", self.render("parts.html", "board_row", row)) for row in rows]
        return [*parts, ("counts", self.render("parts.html", "counts", now.count_boards(store.boards.fetch())))]

    def _list_campaign_parts(self, store: Store) -> list[Part]:
        """Return the campaigns whose row changed, and those that have just ended."""
        open_ = store.campaigns.fetch(over=False)
        if not open_ and not self._campaigns:
            return []
        left = self._campaigns.keys() - {each.name for each in open_}
        boards = store.boards.fetch() if open_ else []
        rows = [now.to_campaign_row(each, boards) for each in open_]
        rows += [now.to_campaign_row(store.campaigns.require(name), []) for name in sorted(left)]
        texts = {row["name"]: self.render("parts.html", "campaign_row", row) for row in rows}
        changed = [row for row in rows if self._campaigns.get(row["name"]) != texts[row["name"]]]
        self._campaigns = {each.name: texts[each.name] for each in open_}
        parts = [(f"campaign-{row['name']}", texts[row["name"]]) for row in changed]
        heads = [(f"head-{row['name']}", self.render("parts.html", "campaign_head", row)) for row in changed]
        return [*parts, *heads]

    # Templates

    def render(self, template: str, macro: str = "", *values: Any, **named: Any) -> str:
        """Render a template, or one macro of it with its arguments."""
        loaded = _environment().get_template(template)
        return str(getattr(loaded.module, macro)(*values)) if macro else loaded.render(**named)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalise,
    )
    environment.filters |= {
        "moment": _moment, "stamp": _stamp, "age": _age, "span": campaign_rows.format_clock, "percent": _percent,
        "latency": units.format_latency, "number": units.format_number, "point": units.format_point,
        "url": lambda text: urllib.parse.quote(str(text), safe=""), "cut": _cut, "bytes": units.format_bytes,
        "count": units.format_count, "watts": describe_watts,
        "clock_time": lambda at: time.strftime("%H:%M:%S", units.to_local_time(at)),
    }  # fmt: skip
    environment.globals |= {"clock": time.time, "note_flop": campaign_rows.note_flop}
    return environment


def _finalise(value: Any) -> Any:
    """Show control and bidi characters as escapes; show what is unknown as a dash."""
    if value is None:
        return units.NOTHING
    if type(value) is str:
        return foreign.show_controls(value)
    return value


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _moment(at: float | None) -> str:
    """Format a time of day, with its date where that is another."""
    if at is None:
        return units.NOTHING
    ago = time.time() - at
    form = "%H:%M:%S" if ago < 12 * 3600 else "%b %d %H:%M" if ago < 300 * 86400 else "%Y-%m-%d"
    return time.strftime(form, units.to_local_time(at))


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", units.to_local_time(at))


def _age(at: float | None) -> str | markupsafe.Markup:
    """Format an age, from which the page's script counts on; its title has the time."""
    if at is None:
        return units.NOTHING
    stamp = _stamp(at)
    title = stamp[:19].replace("T", " ")
    # It holds no untrusted text, and a page has a thousand of them.
    return markupsafe.Markup(  # noqa: S704
        f'<time datetime="{stamp}" title="{title}" data-at="{at:.0f}">{say_age(time.time() - at)}</time>'
    )


def say_age(seconds: float) -> str:
    """Format a span in its largest unit, as `farm.js` does."""
    for limit, divisor, unit in ((100, 1, "s"), (6000, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"
