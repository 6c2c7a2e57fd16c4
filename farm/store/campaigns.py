"""Campaigns: those of one command, and those over a fleet with what operators want of them and how far they are.

What an engine does about an order lives in `farm.campaign`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from device_agent.protocol import NAME_RULE, is_name
from farm.errors import InternalError, UsageError
from farm.store import schema
from farm.store.campaign_rows import (
    KILLED,
    NOT_TAKEN,
    _find,
    _read_state,
    _require,
    _require_open,
    _select_by_age,
    _select_by_id,
    _unknown,
    _was_left,
    find_open,
    list_open,
    select_fleet,
    set_state,
    update_fleet,
)
from farm.store.session import Statement, StorePart, StoreSession
from farm.store.workloads import Workloads
from farm.types import campaigns
from farm.types.states import CampaignState
from farm.values import Workload

RUN, PAUSE, CANCEL = "run", "pause", "cancel"
# Starting an engine takes 3 s, on a busy machine up to a minute (`client.START_TIMEOUT_S`).
UNTAKEN_S = 90.0


class StoredSearch(NamedTuple):
    """What all campaigns have. `settings` of one command has its `process`, of a script also its `target`."""

    id: int
    model: str
    board_type: str
    settings: Mapping[str, Any] | None
    finished_at: float | None
    state: str


class Campaigns(StorePart):
    """Queries on `campaigns`, `fleet_campaigns` and `campaign_progress`."""

    def __init__(self, db: StoreSession, workloads: Workloads) -> None:
        super().__init__(db)
        self._workloads = workloads
        # Campaigns that this process has taken as their engine.
        self._taken: set[int] = set()

    # Of one command

    def start(
        self,
        command: str,
        model: str,
        model_sha256: str,
        board_type: str,
        trials_budget: int,
        settings: Mapping[str, Any],
    ) -> int:
        """Note that a campaign begins; returns its number."""
        with self._db.writing() as connection:
            return self._db.insert(
                connection,
                schema.campaigns,
                started_at=self._db.wall_clock(),
                command=command,
                model=model,
                model_sha256=model_sha256,
                board_type=board_type,
                trials_budget=trials_budget,
                settings=dict(settings),
                state="running",
            )

    def finish(self, campaign: int, state: str) -> None:
        """Note how a campaign ended: `finished`, `interrupted` or `failed`."""
        with self._db.writing() as connection:
            set_state(connection, campaign, state, self._db.wall_clock())

    def fetch_searches(self) -> list[StoredSearch]:
        """All campaigns, the newest first; of those over a fleet only what all campaigns have."""
        columns = (schema.campaigns.c[name] for name in StoredSearch._fields)
        return self._db.read(sa.select(*columns).order_by(schema.campaigns.c.id.desc()), StoredSearch)

    # Over a fleet

    def submit(self, order: campaigns.Order, command: str, workloads: Sequence[Workload]) -> int:
        """Put a campaign into the store for an engine to find; returns its number.

        Each of `workloads` has its `board_type`. Raises UsageError for what is no name, and for one that any campaign
        ever had.
        """
        name, types = order.name, [each.board_type for each in order.types]
        if not is_name(name):
            raise UsageError(f"{name!r} cannot be a campaign's name", f"A name is {NAME_RULE}.")
        with self._db.writing() as connection:
            known = _find(connection, name)
            if known is not None:
                raise UsageError(
                    f"there is a campaign {name!r} already ({known.state})",
                    "A name is used once, since trials and reports go by it: give this one another. "
                    f"`farm campaign show {name}` says what became of the first.",
                )
            number = self._db.insert(
                connection,
                schema.campaigns,
                started_at=self._db.wall_clock(),
                command=command,
                model=", ".join(each.name for each in order.models),
                model_sha256="",
                # Trials of a campaign for several types must say theirs: see `Trials.add`.
                board_type=types[0] if len(types) == 1 else "",
                trials_budget=order.budget.trials or 0,
                settings={},
                state=str(CampaignState.SUBMITTED),
            )
            connection.execute(
                schema.fleet_campaigns.insert().values(
                    campaign=number,
                    name=name,
                    owner=order.owner,
                    reason="waits for an engine",
                    wanted=RUN,
                    order=order.model_dump(mode="json"),
                    budget=order.budget.model_dump(mode="json"),
                )
            )
            self._workloads.insert(connection, number, workloads, types[0] if len(types) == 1 else "")
            told = f"by {order.owner}: {command}"
            self._db.add_event(connection, "campaign_submitted", name, told, order.owner)
        return number

    def fetch(self, *, over: bool | None = None) -> list[campaigns.FleetCampaign]:
        """All campaigns over a fleet, the oldest first; `over` chooses those that are, or are not, at their end."""
        return self._read(_select_by_age(over))

    def fetch_page(self, limit: int, offset: int) -> tuple[list[campaigns.FleetCampaign], int]:
        """A page of fleet campaigns, newest first, and their total."""
        query = select_fleet().order_by(schema.campaigns.c.id.desc()).limit(limit).offset(offset)
        return self._read(query), self._db.count(schema.fleet_campaigns)

    def _read(self, query: sa.Select[Any] | Statement) -> list[campaigns.FleetCampaign]:
        return self._db.read_each("the campaign", self._db.rows(query), campaigns.FleetCampaign.from_row)

    def require(self, name: str) -> campaigns.FleetCampaign:
        """One of them by name. Raises UsageError listing the names."""
        rows = self._db.rows(select_fleet().where(schema.fleet_campaigns.c.name == name))
        if not rows:
            names = [row["name"] for row in self._db.rows(sa.select(schema.fleet_campaigns.c.name))]
            raise _unknown(name, names)
        return campaigns.FleetCampaign.from_row(rows[0])

    def want(self, name: str, wanted: str, by: str) -> campaigns.FleetCampaign:
        """Request `run`, `pause` or `cancel` of a campaign; return it as it is then.

        Its engine carries the request out. Without an engine, `cancel` ends the campaign here, and `run` submits it
        again for the next engine. Requests are idempotent, and a cancellation is final. Raises UsageError for an
        unknown campaign, for one that is over, and for a pause of one without an engine.
        """
        if wanted not in (RUN, PAUSE, CANCEL):
            raise InternalError(f"invalid campaign command {wanted!r}")
        with self._db.writing() as connection:
            campaign = _require_open(connection, name)
            state, idle = campaign.state, campaign.engine is None
            if campaign.wanted == CANCEL:
                return campaign
            if wanted == PAUSE and state is CampaignState.INTERRUPTED:
                raise UsageError(
                    f"campaign {name!r} is interrupted: nothing of it is under way",
                    f"`farm campaign resume {name}` lets it go on.",
                )
            values: dict[str, Any] = {"wanted": wanted}
            if idle and wanted == CANCEL:
                values["reason"] = f"cancelled by {by}"
                set_state(connection, campaign.id, CampaignState.CANCELLED, self._db.wall_clock())
                self._db.add_event(connection, "campaign_cancelled", name, f"cancelled by {by}", by)
            elif idle and wanted == RUN and state is not CampaignState.SUBMITTED:
                values["reason"] = "waits for an engine"
                set_state(connection, campaign.id, CampaignState.SUBMITTED, None)
            if wanted != campaign.wanted or "reason" in values:
                update_fleet(connection, campaign.id, **values)
                told = f"requested by {by}; it was {state}"
                self._db.add_event(connection, f"campaign_{wanted}", name, told, by)
            return _require(connection, name)

    def change_budget(self, name: str, budget: campaigns.Budget, by: str) -> campaigns.FleetCampaign:
        """Replace a campaign's budget; its engine notices soon. Returns the campaign.

        Raises UsageError for an unknown campaign, or one that is over.
        """
        with self._db.writing() as connection:
            campaign = _require_open(connection, name)
            if budget != campaign.budget:
                update_fleet(connection, campaign.id, budget=budget.model_dump(mode="json"))
                after = budget.model_dump()
                told = ", ".join(
                    f"{key} {before} -> {after[key]}" for key, before in sorted(campaign.budget) if before != after[key]
                )
                self._db.add_event(connection, "campaign_budget", name, f"{told}; changed by {by}", by)
            return _require(connection, name)

    def change_folder(self, name: str, folder: str, by: str) -> campaigns.FleetCampaign:
        """Change the folder of a campaign's artifacts, even after its end. Returns the campaign.

        Raises UsageError for an unknown campaign.
        """
        with self._db.writing() as connection:
            campaign = _require(connection, name)
            if campaign.order.compile_to != folder:
                order = campaign.order.model_copy(update={"compile_to": folder})
                update_fleet(connection, campaign.id, order=order.model_dump(mode="json", exclude_unset=True))
                self._db.add_event(connection, "campaign_compile", name, f"artifacts go to {folder}, by {by}", by)
            return _require(connection, name)

    def note(self, campaign: int, state: str, reason: str, engine: Mapping[str, Any] | None = None) -> bool:
        """Store a campaign's state, and with `engine` the engine that has it from now on.

        None leaves the engine, an empty mapping removes it; an interrupted or finished campaign has none in any case. A
        campaign interrupted while being cancelled is cancelled. Returns False, with nothing changed, if the campaign
        was over already: an operator's cancellation may come first. Raises InternalError for an unknown state or
        campaign.
        """
        with self._db.writing() as connection:
            rows = _select_by_id().fetch(connection, number=campaign)
            if not rows:
                raise InternalError(f"there is no fleet campaign number {campaign}")
            known, after = campaigns.FleetCampaign.from_row(rows[0]), _read_state(state)
            if known.over:
                return False
            if after is CampaignState.INTERRUPTED and known.wanted == CANCEL:
                after = CampaignState.CANCELLED
            values: dict[str, Any] = {"reason": reason}
            if after.over or after is CampaignState.INTERRUPTED:
                values["engine"] = None
            elif engine is not None:
                values["engine"] = dict(engine) or None
            update_fleet(connection, campaign, **values)
            if after is not known.state:
                set_state(connection, campaign, after, self._db.wall_clock() if after.over else None)
                # The start of every campaign is no news.
                begins = after is CampaignState.RUNNING and known.state is CampaignState.CONNECTING
                if after is not CampaignState.CONNECTING and not begins:
                    self._db.add_event(connection, f"campaign_{after}", known.name, reason)
        return True

    def save_progress(self, campaign: int, progress: Mapping[str, Any]) -> None:
        """Replace the stored progress of a campaign."""
        with self._db.writing() as connection:
            row = {"campaign": campaign, "progress": dict(progress)}
            self._db.replace(connection, schema.campaign_progress, row)

    def interrupt(
        self,
        is_abandoned: Callable[[Mapping[str, Any]], bool],
        explain: Callable[[Mapping[str, Any]], str] = lambda engine: "",
    ) -> list[str]:
        """Mark campaigns as interrupted if `is_abandoned` says that their engine is gone; return their names.

        `explain` returns the engine's reason for leaving; an engine without one was killed. Paused campaigns stay
        paused, and those being cancelled are cancelled. One transaction, so that a campaign taken by a new engine
        meanwhile is left alone. `is_abandoned` must be quick.
        """
        with self._db.writing() as connection:
            # Only open ones: hundreds may be over, and all writers wait for this.
            open_ = [each for each in list_open(connection) if each.engine is not None]
            interrupted = []
            for each in open_:
                if not is_abandoned(each.engine or {}):
                    continue
                reason = explain(each.engine or {}) or f"{KILLED} {each.state}"
                after = CampaignState.INTERRUPTED
                if each.wanted == CANCEL:
                    after = CampaignState.CANCELLED
                elif each.wanted == PAUSE and each.state is CampaignState.PAUSED:
                    after, reason = each.state, each.reason
                else:
                    interrupted.append(each.name)
                self._leave(connection, each, after, reason)
        return interrupted

    def interrupt_untaken(self) -> list[str]:
        """Mark campaigns as interrupted that no engine has taken for `UNTAKEN_S`; return their names.

        Those being cancelled are cancelled. The caller knows that no engine lives.
        """
        with self._db.writing() as connection:
            names = [each for each in list_open(connection) if self._is_untaken(connection, each)]
            for each in names:
                after = CampaignState.CANCELLED if each.wanted == CANCEL else CampaignState.INTERRUPTED
                self._leave(connection, each, after, NOT_TAKEN)
        return [each.name for each in names if each.wanted != CANCEL]

    def _leave(
        self, connection: sa.Connection, each: campaigns.FleetCampaign, after: CampaignState, reason: str
    ) -> None:
        update_fleet(connection, each.id, reason=reason, engine=None)
        if after is not each.state:
            set_state(connection, each.id, after, self._db.wall_clock() if after.over else None)
            self._db.add_event(connection, f"campaign_{after}", each.name, reason)

    def count(self) -> dict[str, int]:
        """Fleet campaigns by state; states without any are missing."""
        common, fleet = schema.campaigns, schema.fleet_campaigns
        rows = self._db.rows(
            sa.select(common.c.state, sa.func.count().label("campaigns"))
            .join(fleet, fleet.c.campaign == common.c.id)
            .group_by(common.c.state)
        )
        return {row["state"]: row["campaigns"] for row in rows}

    def take(self, campaign: int, engine: Mapping[str, Any]) -> bool:
        """Assign a submitted campaign to an engine; only one of several gets it. Returns False for the others."""
        with self._db.writing() as connection:
            found = find_open(connection, campaign)
            if found is None or found.state is not CampaignState.SUBMITTED or found.wanted != RUN:
                return False
            if found.engine is not None and dict(found.engine) != dict(engine):
                return False
            update_fleet(connection, campaign, engine=dict(engine))
        self._taken.add(campaign)
        return True

    def take_back(self, engine: Mapping[str, Any]) -> list[str]:
        """Submit to `engine` again what it had before a fault of the store; return the names.

        Includes campaigns that others marked as killed meanwhile, and excludes those of another engine by now. Paused
        ones stay paused, without an engine.
        """
        names = []
        with self._db.writing() as connection:
            for each in list_open(connection):
                kept = each.engine == dict(engine)
                lost = each.id in self._taken and each.engine is None and _was_left(each)
                if kept and each.state is CampaignState.PAUSED:
                    update_fleet(connection, each.id, engine=None)
                elif kept or lost:
                    update_fleet(connection, each.id, engine=dict(engine), reason="its engine begins anew with it")
                    set_state(connection, each.id, CampaignState.SUBMITTED, None)
                    names.append(each.name)
        return names

    def fetch_left(self, is_gone: Callable[[Mapping[str, Any]], bool]) -> list[str]:
        """Names of open campaigns whose engine was killed or failed, whether marked or not."""
        return [
            each.name
            for each in self.fetch(over=False)
            if each.wanted == RUN and (is_gone(each.engine) if each.engine else _was_left(each))
        ]

    # Inside a transaction

    def _is_untaken(self, connection: sa.Connection, campaign: campaigns.FleetCampaign) -> bool:
        """Whether a campaign has waited for an engine for `UNTAKEN_S` since it was last submitted or asked for."""
        if campaign.state is not CampaignState.SUBMITTED or campaign.engine is not None or campaign.wanted == PAUSE:
            return False
        events = schema.events
        last = connection.execute(
            sa.select(sa.func.max(events.c.at)).where(
                events.c.subject == campaign.name, events.c.kind.startswith("campaign_")
            )
        ).scalar()
        return self._db.wall_clock() - (last or campaign.started_at) > UNTAKEN_S
