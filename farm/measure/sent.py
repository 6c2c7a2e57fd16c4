"""Which programs a board has already, so that each is sent once in a session."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable

from device_agent.protocol import ProtocolError
from farm.errors import PermanentError
from farm.measure import answers
from farm.measure.handed import Handed

# Below this, asking for a program by name costs as much as sending it.
LEAST_BYTES = 256 << 10
# More than any agent keeps.
_MOST = 1024

_log = logging.getLogger(__name__)


class SentPrograms:
    """Those of one session. `keep` has the board keep a program, by its digest; it answers what it has then."""

    def __init__(self, keep: Callable[[str, bytes | Handed], object]) -> None:
        self._keep = keep
        self._there: frozenset[str] = frozenset()
        self._can_keep = True
        self._latest: tuple[bytes, str] = (b"", "")

    def find(self, program: bytes | Handed) -> str | None:
        """The digest that a program is run by, once the board has it; None where it is to be sent with the run.

        Raises what `keep` raises but for PermanentError: an agent without room for it runs it all the same.
        Raises ProtocolError for an answer that cannot be.
        """
        if not self._can_keep or len(program) < LEAST_BYTES:
            return None
        if isinstance(program, Handed):
            digest = program.sha256
        else:
            if program is not self._latest[0]:
                self._latest = program, hashlib.sha256(program).hexdigest()
            digest = self._latest[1]
        if digest not in self._there:
            try:
                self._there = _read(self._keep(digest, program))
            except PermanentError as error:
                _log.info("programs are sent with every run: %s", error)
                self._can_keep = False
                return None
        return digest if digest in self._there else None


def _read(answer: object) -> frozenset[str]:
    try:
        digests = json.loads(answers.read_text(answer))
    except ValueError as error:
        raise ProtocolError(f"programs are kept, but which is not said: {error}") from error
    if not isinstance(digests, list) or len(digests) > _MOST or not all(isinstance(each, str) for each in digests):
        raise ProtocolError("programs are kept, but which is not said")
    return frozenset(digests)
