"""When what ended, or could not be had, is tried again: with growing pauses, which what held for long forgets."""

from __future__ import annotations

import dataclasses
import random
import time

# What held for so long ended for a new reason: begin with short pauses again.
STABLE_S = 30.0


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Pauses between attempts, in seconds: each is drawn from the upper half of a span that doubles up to `last_s`."""

    first_s: float = 0.5
    last_s: float = 15.0
    give_up_s: float = float("inf")

    def plan_pause_s(self, attempt: int) -> float:
        """The pause after the `attempt`-th failure in a row, from 1. Random, so that a rack does not come at once."""
        span_s = min(self.last_s, self.first_s * 2.0 ** min(attempt - 1, 32))
        return random.uniform(span_s / 2, span_s)


class Restarts:
    """The attempts at one thing. Not thread-safe."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._up_since: float | None = None
        self._again_at = 0.0
        self.failures = 0  # in a row

    @property
    def due(self) -> bool:
        """Whether the pause is over."""
        return time.monotonic() >= self._again_at

    def note_up(self) -> None:
        """It is there."""
        self._up_since = time.monotonic()

    def note_end(self) -> float:
        """It ended, or did not come up; returns the pause before the next attempt, in s."""
        now = time.monotonic()
        stable = self._up_since is not None and now - self._up_since >= STABLE_S
        self._up_since = None
        self.failures = 1 if stable else self.failures + 1
        pause_s = self._backoff.plan_pause_s(self.failures)
        self._again_at = now + pause_s
        return pause_s
