"""Programs that a client runs more than once, kept for its session, so that each travels to the board once."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

# So many, and so many bytes of them, are kept; the one that was used longest ago goes first.
MOST, MOST_BYTES = 16, 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Programs:
    """Files in `folder`, named by the SHA-256 of what they hold, in the order of their last use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    def keep(self, digest: str, program: bytes) -> list[str]:
        """Keep a program; returns the digests of all that are kept. Raises ValueError for another's digest, OSError."""
        if not _DIGEST.fullmatch(digest) or not _is_of(program, digest):
            raise ValueError(f"{digest[:64]!r} is not the SHA-256 of the program that came with it")
        self._folder.mkdir(exist_ok=True)
        self._forget(digest)
        while self._sizes and (len(self._sizes) >= MOST or sum(self._sizes.values()) + len(program) > MOST_BYTES):
            self._forget(next(iter(self._sizes)))
        try:
            (self._folder / digest).write_bytes(program)
        except OSError:
            (self._folder / digest).unlink(missing_ok=True)
            raise
        self._sizes[digest] = len(program)
        return list(self._sizes)

    def take(self, digest: str) -> bytes:
        """A program that is kept. Raises ValueError where it is not, or was changed: candidates have run since."""
        size = self._sizes.pop(digest, None)
        if size is None:
            raise ValueError(f"no program {digest[:64]!r} is kept")
        program = (self._folder / digest).read_bytes()
        if not _is_of(program, digest):
            raise ValueError(f"the program {digest} was changed on the board")
        self._sizes[digest] = size
        return program

    def _forget(self, digest: str) -> None:
        if self._sizes.pop(digest, None) is not None:
            (self._folder / digest).unlink(missing_ok=True)


def _is_of(program: bytes, digest: str) -> bool:
    return hmac.compare_digest(hashlib.sha256(program).hexdigest(), digest)
