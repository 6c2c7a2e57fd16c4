"""Find campaigns whose engine was killed, on any host, and start a process that continues them with this host's engine.

Only with `farm up --take-over`, and only on a store that hosts share.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from device_agent.protocol.interpreters import python_command
from farm.errors import FarmError
from farm.processes import children
from farm.processes.children import Backoff, Restarts
from farm.processes.machine import find_engines_gone
from farm.store import Store

if TYPE_CHECKING:
    from farm.services.keeper import Keeper

_LOOK_S = 5.0
# A campaign that kills every engine gets another at growing pauses.
_BACKOFF = Backoff(first_s=60.0, last_s=3600.0)
# The process waits until its engine has loaded TVM and Ray, on a busy machine.
_LIMIT_S = 180.0
LOG_FILE = "take-over.log"

_log = logging.getLogger(__name__)


class TakeOver:
    """Active while `on`. Used by the keeper's main thread alone."""

    def __init__(self, store: Store, logs: Path, on: bool = False) -> None:
        """`logs` is the folder for the process's output."""
        self.on = on
        self._store, self._log_file = store, logs / LOG_FILE
        self._look_at = 0.0
        self._tries: dict[str, Restarts] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0

    def watch(self, keeper: Keeper | None = None) -> None:
        """Start the process for campaigns that have no engine; cheap to call on every turn."""
        now = time.monotonic()
        if self._process is not None and (self._process.poll() is not None or now > self._until):
            self.close()
        if not self.on or self._process is not None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if not isinstance(self._store.location, str):
            return  # a file: this host's own, whose campaigns wait for their operator
        try:
            left = self._store.fetch_left_campaigns(find_engines_gone(self._store))
            names = [name for name in left if self._tries.setdefault(name, Restarts(_BACKOFF)).due]
            if names:
                self._begin(names)
        except FarmError as error:  # the store is busy, or there is no memory for a process
            _log.warning("%s", error)

    def close(self) -> None:
        """End the process, if one runs. Campaigns that it has resumed wait for any engine."""
        if self._process is not None:
            children.stop(self._process)
            self._process = None

    def _begin(self, names: list[str]) -> None:
        for name in names:
            self._tries[name].note_end()
            _log.info("campaign %s was left by an engine that is gone; taking it over", name, extra={"campaign": name})
        command = python_command("-m", "farm.campaign.engine", "--take-over", *names)
        self._process = children.start(command, self._log_file, os.environ)
        self._until = time.monotonic() + _LIMIT_S
