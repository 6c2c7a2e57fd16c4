"""The phases of a host that is a board itself: what it decides, over fleets whose answers are given by hand."""

from __future__ import annotations

from device_agent.protocol import FaultSide
from farm.campaign.scheduler import events
from farm.campaign.scheduler.state import Phase, Status
from tests.unit.fleet_campaigns import Hands


def host(**settings: object) -> Hands:
    hands = Hands(**settings)
    hands.boards("here", is_host=True)
    return hands.add()


def busy(hands: Hands) -> bool:
    return bool(hands.searches or hands.builds)


def test_nothing_is_measured_while_the_host_searches_or_builds() -> None:
    """In a whole campaign the host never does both at a time, and every trial of the budget is made."""
    hands = host()
    while busy(hands) or hands.measures:
        assert not (busy(hands) and hands.measures)
        if hands.searches:
            hands.propose(next(iter(hands.searches)))
        elif hands.builds:
            hands.build(next(iter(hands.builds)))
        else:
            hands.measure(hands.running()[0].assignment)
    assert hands.status() is Status.FINISHED
    assert len(hands.of("count")) == 100


def test_the_first_phase_is_short_and_the_others_are_two_batches() -> None:
    """A trial is seen after one request to the search; later the queue is filled first."""
    hands = host(batch=4, warmup=2)
    assert len(hands.searches) == 1
    hands.supply()
    assert hands.state.phase is Phase.MEASURING
    while hands.running():
        hands.measure(hands.running()[0].assignment)
    assert hands.state.phase is Phase.PREPARING
    hands.supply()
    assert 8 <= sum(lane.ahead for lane in hands.state.lanes) + len(hands.measures) <= 12


def test_a_build_that_fails_leaves_the_host_with_the_others() -> None:
    """Candidates that do not build end no phase early and hold none up."""
    hands = host()
    hands.supply()
    while hands.running():
        hands.measure(hands.running()[0].assignment)
    while hands.searches:
        hands.propose(next(iter(hands.searches)))
    hands.build(next(iter(hands.builds)), FaultSide.CANDIDATE)
    assert not hands.measures
    hands.supply()
    assert hands.measures
    assert not busy(hands)


def test_a_paused_campaign_does_not_hold_the_host() -> None:
    """What was built for a campaign that is paused waits; another one's searches go on."""
    hands = host()
    hands.supply()
    hands.add("other")
    assert not busy(hands)
    hands.tell(events.pause, "vision")
    while hands.running():
        hands.measure(hands.running()[0].assignment)
    assert {search.task.campaign for search in hands.searches.values()} == {"other"}


def test_a_host_that_measures_winners_rests() -> None:
    """Neither search nor build begins while winners are measured on it, and both do afterwards."""
    hands = Hands("nano-1")
    hands.state.reserved = True
    hands.add()
    assert not busy(hands)
    hands.state.reserved = False
    hands.tell()
    assert busy(hands)


def test_boards_elsewhere_measure_in_every_phase() -> None:
    """A board that is not the host gets what was built for it while the host searches."""
    hands = Hands()
    hands.boards("here", board_type="local", is_host=True)
    hands.boards("nano-1")
    hands.add(board_types=("nano", "local"))
    requests = {search.task.board_type: request for request, search in hands.searches.items()}
    hands.propose(requests["nano"])
    for job in [job for job, build in hands.builds.items() if build.task.board_type == "nano"]:
        hands.build(job)
    assert requests["local"] in hands.searches
    assert {measure.board for measure in hands.measures.values()} == {"nano-1"}
