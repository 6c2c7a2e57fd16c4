"""Signals while Ray starts: heard afterwards, by the farm's own handlers."""

from __future__ import annotations

import signal

import pytest
import ray

from farm.campaign.engine.ray_calls import own_signal_handlers

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_heard_after_the_block(number: signal.Signals) -> None:
    """Nothing interrupts what stands in the block, nor does a handler of Ray's get it; then it is ours, once."""
    heard: list[str] = []
    before = signal.signal(number, lambda *_: heard.append("ours"))
    try:
        with own_signal_handlers():
            ray._private.utils.set_sigterm_handler(lambda *_: heard.append("Ray's"))
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert heard == []
        assert heard == ["ours"]
        signal.raise_signal(number)
        assert heard == ["ours", "ours"]
    finally:
        signal.signal(number, before)


def test_what_fails_in_the_block_is_told() -> None:
    """An error of the block passes, and handlers are as before."""
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(ConnectionError), own_signal_handlers():
        raise ConnectionError
    assert [signal.getsignal(each) for each in SIGNALS] == before
