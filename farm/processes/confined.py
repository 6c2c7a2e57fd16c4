"""Process foreign input in a confined process: bytes in, bytes out, nothing else.

`confinement` defines what the process may do. Its answer is never unpickled, because its input may have taken it over.
Long work of the farm's own is in `jobs`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from device_agent.protocol.interpreters import python_command
from farm import errors
from farm.errors import FarmError, InternalError, UsageError
from farm.processes import children, confinement

# The process may write only in its home: its input and its log are outside.
_GIVEN, _LOG, _HOME = "given", "log", "home"
_ANSWER, _ERROR = "home/answer", "home/error.json"
_ERROR_BYTES = 64 << 10
# The child's exit code for its memory limit.
_OUT_OF_MEMORY = 7
# The environment that a child needs; the rest may be confidential.
_KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "TZ")


@dataclasses.dataclass(frozen=True)
class ConfinedLimits:
    """Limits of a confined process; `answer_bytes` bounds its answer."""

    memory_bytes: int = 4 << 30
    timeout_s: float = 120.0
    answer_bytes: int = 2 << 30


def call(
    function: str, payload: bytes, what: str, limits: ConfinedLimits = ConfinedLimits(), *, trusted: bool = False
) -> bytes:
    """Apply the function `module:name`, from bytes to bytes, to `payload` in a confined process.

    `what` begins error messages ("model.pt2 was not converted"). The process works in an empty temporary folder, its
    home. With `trusted` the user vouches for the payload, and only memory and time are limited. Raises the function's
    FarmError, and UsageError if the process crashed or exceeded memory, time or answer length.
    """
    with tempfile.TemporaryDirectory(prefix="farm-confined-") as text:
        folder = Path(text)
        (folder / _GIVEN).write_bytes(payload)
        (folder / _HOME).mkdir()
        orders = [function, str(limits.memory_bytes), str(limits.timeout_s), "trusted" if trusted else "foreign"]
        home = str(folder / _HOME)
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= {"HOME": home, "TMPDIR": home, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = python_command("-m", __name__, text, *orders)
        process = children.start(command, folder / _LOG, environment)
        try:
            code = process.wait(limits.timeout_s)
        except subprocess.TimeoutExpired:
            raise UsageError(f"{what} within {limits.timeout_s:g} s") from None
        finally:
            children.stop(process, 0.0)
        return _take_answer(folder, code, what, limits)


def _take_answer(folder: Path, code: int, what: str, limits: ConfinedLimits) -> bytes:
    if code == 0:
        return _read(folder / _ANSWER, limits.answer_bytes, what)
    if code == 1:
        raise _error(_read(folder / _ERROR, _ERROR_BYTES, what), what)
    if code == _OUT_OF_MEMORY:
        raise UsageError(f"{what}: it takes more than {limits.memory_bytes / 2**30:.3g} GiB of memory")
    raise UsageError(f"{what}: the process that read it ended ({children.explain_end(folder / _LOG, code)})")


def _read(path: Path, most: int, what: str) -> bytes:
    """Read a plain file of bounded length; a link could lead to files that the process itself may not read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{what}: the process that read it gave no answer") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{what}: the process that read it gave no answer")
        data = file.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{what}: what came of it has more than {most:,} bytes")
    return data


def _error(data: bytes, what: str) -> FarmError:
    """The function's error: of its class if that is the farm's, else one beginning with `what`."""
    try:
        name, message, hint = (str(part) for part in json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return UsageError(f"{what}: the process that read it gave no answer")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, FarmError) and kind is not InternalError:
        return kind(message, hint)
    return UsageError(f"{what}: {message}")


def main(folder: Path, function: str, memory_bytes: int, timeout_s: float, trusted: bool) -> int:
    """The process's main function."""
    os.chdir(folder / _HOME)
    payload = (folder / _GIVEN).read_bytes()
    confinement.limit(memory_bytes, timeout_s)
    if not trusted:
        confinement.confine(folder / _HOME)
    module, name = function.split(":")
    try:
        answer: bytes = getattr(importlib.import_module(module), name)(payload)
        (folder / _ANSWER).write_bytes(answer)
    except MemoryError:
        return _OUT_OF_MEMORY
    except FarmError as error:
        return _say(folder, type(error).__name__, error.message, error.hint)
    except Exception as error:  # noqa: BLE001 - the edge of a process: the error is the answer
        return _say(folder, "", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", "")
    return 0


def _say(folder: Path, kind: str, message: str, hint: str) -> int:
    (folder / _ERROR).write_text(json.dumps([kind, message, hint]))
    return 1


if __name__ == "__main__":
    _status = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "trusted")
    sys.stderr.flush()
    # Loaded libraries may have threads and destructors: do not wait for them.
    os._exit(_status)
