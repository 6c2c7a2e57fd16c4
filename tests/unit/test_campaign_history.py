"""A campaign's history is what an operator would tell."""

from __future__ import annotations

from farm.report import campaign_words


def event(at: float, kind: str, message: str = "") -> dict[str, object]:
    return {"at": at, "kind": kind, "message": message}


def test_what_searches_say_as_they_begin_is_one_line() -> None:
    """Fifty tasks that begin from what is known elsewhere are reported once; all else in its place, in plain words."""
    events = [event(1.0, "campaign_submitted", "by ana@desk"), event(2.0, "campaign_running")]
    events += [event(3.0 + number, "warm_start", f"task {number}: 412 trials") for number in range(50)]
    events += [event(60.0, "campaign_paused", "by ana@desk"), event(70.0, "board_lied", "12 trials are doubted")]
    assert list(campaign_words.tell(events)) == [
        (1.0, "submitted: by ana@desk"),
        (2.0, "measuring"),
        (3.0, "50 tasks began with what is known from elsewhere (see Warm start)"),
        (60.0, "paused: by ana@desk"),
        (70.0, "board lied: 12 trials are doubted"),
    ]
