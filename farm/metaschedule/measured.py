"""What this process's runners have measured lately, so that a database can keep whose figures it is given.

MetaSchedule hands a database seconds and nothing else: no board, no evidence, not whether the figures are simulated.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence

from device_agent.protocol import Outcome

# MetaSchedule commits a batch as soon as it is measured; this is many batches.
_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class MeasuredLately:
    """A good outcome, for how many seconds the board was busy with it, and the type of board that it is from."""

    outcome: Outcome
    board_s: float
    board_type: str


class Recent:
    """The last outcomes by their samples, which no two runs share to the last bit. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_samples: OrderedDict[tuple[float, ...], MeasuredLately] = OrderedDict()
        # The type of board that the newest runner measures on; "" while there is none.
        self.board_type = ""

    def add(self, measured: MeasuredLately) -> None:
        """Remember an outcome."""
        with self._lock:
            self._by_samples[tuple(measured.outcome.latency_s)] = measured
            if len(self._by_samples) > _KEPT:
                self._by_samples.popitem(last=False)

    def find(self, samples_s: Sequence[float]) -> MeasuredLately | None:
        """The outcome with exactly these samples; None where no runner of ours made them."""
        with self._lock:
            return self._by_samples.get(tuple(samples_s))


recent = Recent()
