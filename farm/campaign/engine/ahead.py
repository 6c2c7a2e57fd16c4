"""An engine that is started ahead of the campaign it is for: Ray and the services come up while models are read.

Both sides: a command holds the pipe that is its engine's standard input until the campaign is submitted, or will not
be; the engine, which ends where no campaign needs it, waits as long as that pipe is open. Whatever becomes of the
command, the pipe closes with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import subprocess
from collections.abc import Iterator

from farm.campaign.engine.client import ensure_engine, spawn_engine
from farm.campaign.engine.state import is_held
from farm.settings import Settings

_STDIN = 0


class Ahead:
    """What a command has of the engine that it may start; see `engine_ahead`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start an engine, unless one runs."""
        if not is_held(self._settings.home_path):
            self.process = spawn_engine(self._settings, stdin=subprocess.PIPE)

    def ensure(self) -> None:
        """See that an engine does what stands in the store by now. Raises what `ensure_engine` raises."""
        ensure_engine(self._settings, self.process)
        self.close()

    def close(self) -> None:
        """Expect nothing more of the engine than what stands in the store."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


@contextlib.contextmanager
def engine_ahead(settings: Settings) -> Iterator[Ahead]:
    """An engine for what the block will submit; it ends with the block if that has submitted nothing."""
    ahead = Ahead(settings)
    try:
        yield ahead
    finally:
        ahead.close()


def is_expected() -> bool:
    """Whether somebody is about to submit a campaign to us, the engine. Does not wait."""
    try:
        if not stat.S_ISFIFO(os.fstat(_STDIN).st_mode):
            return False
    except OSError:  # closed
        return False
    # Nobody writes there: what can be read is the end.
    return not select.select([_STDIN], [], [], 0)[0]
