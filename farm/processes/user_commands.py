"""Commands that users name in their files: a program and its arguments, run without a shell and within a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from farm.errors import PermanentError, TransientError

# The end of what a command printed, for people: a line or two.
_SAID_BYTES = 400


def run(
    command: Sequence[str], timeout_s: float, *, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> str:
    """Run a command to its end; returns the last of what it printed. What it left running in its group is ended.

    `environment` comes on top of our own. Raises PermanentError where it cannot be run, TransientError where it does
    not end in time or ends with another exit code than 0.
    """
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env={**os.environ, **(environment or {})},
                cwd="/",
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise PermanentError(f"{command[0]} cannot be run: {getattr(error, 'strerror', None) or error}") from None
        try:
            process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            raise TransientError(f"{command[0]} did not end within {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID_BYTES))
        text = " ".join(said.read().decode(errors="replace").split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    if process.returncode:
        raise TransientError(f"{command[0]} ended with exit code {process.returncode}{f': {text}' if text else ''}")
    return text
