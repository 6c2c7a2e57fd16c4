"""What every store promises of who changed what: people's orders by name, and nothing that the farm does by itself."""

from __future__ import annotations

from farm.crew.health import Kind, Observation, decide_by
from farm.settings import StoreLocation
from farm.values import WorkKind
from tests.fleet_store import Clocks, observe, open_fleet, take
from tests.unit.campaign_orders import make_order, submit


def test_changes_are_peoples(place: StoreLocation) -> None:
    """A board registered, drained, reserved, its lease ended by force; a campaign's pause; a priority: each by whom."""
    clocks = Clocks()
    with open_fleet(place, clocks) as store:
        store.leases.release(take(store, "engine pid 7"))
        observe(store, Kind.PROBE_FAILED)
        observe(store, Kind.PROBE_PASSED)
        store.boards.observe("nano-01", "power_cycled", "services", decide_by(Observation(Kind.POWER_CYCLED)))
        observe(store, Kind.PROBE_PASSED)
        clocks.pass_s(10)
        store.leases.acquire("nano-01", "ann@lab", "reserved: a look", kind=WorkKind.RESERVED)
        store.leases.force_release("nano-01", "bob@lab", "needed")
        submit(store, make_order("vision"))
        store.campaigns.want("vision", "cancel", "bob@lab")
        waits = store.queue.enter("cat", WorkKind.SWEEP, "sweep x", "jetson-nano", ["nano-01"])
        clocks.pass_s(1)
        store.queue.set_priority(waits, 2, "cat@lab")
        store.events.add("board_taken", "jetson-nano/nano-01", "by the farm")
        changes = store.events.fetch_changes(50)
        assert {(each.kind, each.by) for each in changes if each.by in ("ann@lab", "bob@lab", "cat@lab")} == {
            ("lease_taken", "ann@lab"),
            ("lease_forced", "bob@lab"),
            ("campaign_cancel", "bob@lab"),
            ("campaign_cancelled", "bob@lab"),
            ("queue_priority", "cat@lab"),
        }
        assert changes[-1].kind == "registered"
        assert "services" not in {each.by for each in changes}
        assert {"probe_failed", "board_taken"}.isdisjoint(each.kind for each in changes)
        assert [each.kind for each in store.events.fetch_changes(1)] == ["queue_priority"]
        assert {each.subject for each in store.events.fetch_changes(50, subject="vision")} == {"vision"}
        assert store.events.fetch_changes(50, since=clocks.wall + 1) == []
