"""When what ended is tried again."""

from __future__ import annotations

import types

import pytest

from farm.processes import children
from farm.processes.children import Backoff, Restarts


def test_pauses_grow_until_it_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every end in a row doubles the pause, to its last value; what was up for long enough begins anew."""
    now = 100.0
    monkeypatch.setattr(children, "time", types.SimpleNamespace(monotonic=lambda: now))
    tries = Restarts(Backoff(first_s=1.0, last_s=4.0))
    assert tries.due
    spans = []
    for held_s in (0.0, 1.0, 0.0, 2 * children.STABLE_S):
        if held_s:
            tries.note_up()
            now += held_s
        pause_s = tries.note_end()
        assert not tries.due
        now += pause_s
        assert tries.due
        spans.append((tries.failures, pause_s))
    assert [failures for failures, _ in spans] == [1, 2, 3, 1]
    assert all(
        low <= pause_s <= high
        for (_, pause_s), (low, high) in zip(spans, [(0.5, 1), (1, 2), (2, 4), (0.5, 1)], strict=True)
    )


def test_pauses_grow_to_a_bound_and_differ() -> None:
    """Between half of the span and all of it; the span doubles."""
    backoff = Backoff(first_s=0.5, last_s=15.0)
    for attempt, span_s in ((1, 0.5), (2, 1.0), (3, 2.0), (6, 15.0), (10_000, 15.0)):
        pauses = [backoff.plan_pause_s(attempt) for _ in range(50)]
        assert all(span_s / 2 <= pause <= span_s for pause in pauses)
        assert len(set(pauses)) > 1
