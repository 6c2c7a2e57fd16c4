"""What pages show of everything at once: marks that follow each write, lists in parts, the newest of what happened."""

from __future__ import annotations

from farm.crew.health import Kind, Observation, decide_by
from farm.settings import StoreLocation
from farm.store import Store
from farm.web.now import FAULTS
from tests import web_store


def test_what_pages_ask_for(place: StoreLocation) -> None:
    """Each query gives what was written, newest or oldest first as it says, and no more than it was asked for."""
    with Store(place) as store:
        web_store.fill(store, boards=12, trials=60)
        before = store.events.fetch_overview_mark()
        store.boards.observe("nano-01", Kind.DRAIN, "ana", decide_by(Observation(Kind.DRAIN, "new fan")))
        store.events.add("campaign_paused", web_store.CAMPAIGN, "for a while")
        store.events.add("board_taken", "jetson-nano/nano-01", "lease 1")
        web_store.add_trial_now(store)
        after = store.events.fetch_overview_mark()
        assert (after.trial, after.golden) == (before.trial + 1, before.golden)
        assert store.events.fetch_changed_boards(before.board_event) == ["nano-01"]
        assert [each.health for each in store.boards.fetch_some(["nano-01"])] == ["maintenance"]
        newest = store.events.fetch_newest(2)
        assert {(each.subject, each.kind) for each in newest} == {
            ("nano-01", "drain"),
            (web_store.CAMPAIGN, "campaign_paused"),
        }
        assert [each.message for each in store.events.fetch_newest(1, web_store.CAMPAIGN)] == ["for a while"]
        faults = store.events.fetch_last_faults(FAULTS)
        assert faults["tx2-03"].kind in FAULTS
        assert store.events.fetch_last_faults(FAULTS, "tx2-03").keys() == {"tx2-03"}
        trials = list(store.trials.fetch_since(1, before.trial - 2))
        assert [row[0] for row in trials] == [before.trial - 1, before.trial, after.trial]
        assert [each.board for each in store.trials.fetch_newest_outcomes(before.trial, 9)] == [trials[-1][6]]
        assert len(store.golden.fetch_since(0, 3)) == 12 * 3
        campaigns, count = store.campaigns.fetch_page(1, 0)
        assert ([each.name for each in campaigns], count) == ([web_store.CAMPAIGN], 1)
        sweeps, count = store.sweeps.fetch_page(1, 1)
        assert ([each.id for each in sweeps], count) == ([1], 2)
