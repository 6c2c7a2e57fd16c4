"""`python -m farm.campaign.engine.take_over NAME…`: campaigns whose engine was killed go on with one of this host.

The services start it where an operator has said that this host may; what they look at is `farm.services.take_over`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from farm import settings as farm_settings
from farm.campaign.engine import control
from farm.campaign.engine.client import ensure_engine
from farm.errors import FarmError, UsageError
from farm.processes import home_log
from farm.processes.machine import find_engines_gone, name_coordinator
from farm.store import Store

_log = logging.getLogger(__name__)


def main(names: Sequence[str]) -> int:
    """Resume those of the campaigns that are still left, and see that an engine runs. Returns the exit code."""
    try:
        settings = farm_settings.load()
        home_log.start_log("take-over", settings.home_path / "logs")
        with Store(settings.store_location) as store:
            left = [name for name in store.fetch_left_campaigns(find_engines_gone(store)) if name in names]
            for name in left:
                try:
                    control.resume(store, name, f"{name_coordinator()}, which takes over")
                except UsageError as error:  # cancelled meanwhile
                    _log.info("%s: %s", name, error)
        if left:
            ensure_engine(settings)
    except FarmError as error:
        _log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
