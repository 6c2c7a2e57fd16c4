"""Wait out faults of the store: the engine's parts end, and begin again from what the store holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from farm.errors import StoreFaultError, TransientError, UnavailableError
from farm.store import Store

# A failover of PostgreSQL takes minutes. After that, the engine of another host may reach the store where this cannot.
STORE_PATIENCE_S = 900.0
# A run of this length shows that the store works: the next fault has the whole patience again.
_HEALTHY_S = 60.0
_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


def run_through_outages(
    run: Callable[[], None],
    store: Store,
    me: Mapping[str, Any],
    stopping: Callable[[], bool],
    patience_s: float = STORE_PATIENCE_S,
) -> None:
    """Call `run`, and again after each fault of the store, once the store answers; `me` gets its campaigns back.

    Raises what `run` raises, and StoreFaultError where the store fails for `patience_s` or `stopping` says so.
    """
    deadline = 0.0
    while True:
        began = time.monotonic()
        try:
            run()
        except StoreFaultError as error:
            now = time.monotonic()
            if not deadline or now - began > _HEALTHY_S:
                deadline = now + patience_s
            _log.warning("the store failed; waiting up to %.0f s for it: %s", deadline - now, error.message)
            _await_store(error, store, me, stopping, deadline)
        else:
            return


def _await_store(
    fault: StoreFaultError, store: Store, me: Mapping[str, Any], stopping: Callable[[], bool], deadline: float
) -> None:
    """Wait until the store has given `me` its campaigns back. Raises `fault` after `deadline`, or when stopping."""
    while True:
        if stopping() or time.monotonic() > deadline:
            raise fault
        time.sleep(_PAUSE_S)
        try:
            names = store.take_back_campaigns(me)
        except (TransientError, UnavailableError) as error:
            _log.info("the store still fails: %s", error.message)
        else:
            _log.info("the store works again; campaigns go on: %s", ", ".join(names) or "none")
            return
