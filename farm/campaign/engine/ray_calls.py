"""Run Ray on this machine for a block, and wait for its answers.

Its actors are in `searches` and `builds`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import ray

from farm.errors import DeadlineError, FarmError, PermanentError, UnavailableError
from farm.foreign import find_first_line
from farm.search.codegen import lowering
from farm.settings import find_folders

_CONSTANTS, _UTILS = "_private.ray_constants", "_private.utils"
_SWITCH, _IS_ON = f"{_CONSTANTS}.ENABLE_RAY_CLUSTERS_ENV_VAR", f"{_CONSTANTS}.ENABLE_RAY_CLUSTER"
_HANDLER = f"{_UTILS}.set_sigterm_handler"
_CONFIG, _TOKENS = "_raylet.Config.initialize", "_raylet.AuthenticationTokenLoader.instance"
_NODE = "_private.node.Node"
# Each is a process that imports all of Ray, and none is needed on one machine without a dashboard: log printing, the
# autoscaler's monitor, the dashboard.
_SERVANTS = tuple(f"{_NODE}.{name}" for name in ("start_log_monitor", "start_monitor", "start_api_server"))

# Below `ray`, with the feature of the farm that depends on it.
PARTS = {
    _SWITCH: "a Ray of our own listens on loopback alone",
    _IS_ON: "a Ray of our own listens on loopback alone",
    _HANDLER: "signals while Ray starts are ours",
    _CONFIG: "each Ray has a token of its own",
    _TOKENS: "each Ray has a token of its own",
    **dict.fromkeys(_SERVANTS, "a Ray of our own starts no superfluous process"),
}
_PREFIX = "farm-ray-"
# Ray makes the folders that it is given world-writable (mode 0777), so a private one surrounds them.
_INNER = "r"
# The kernel takes 107 characters: ours add up to 28 (process numbers have seven digits), Ray's socket names 64.
_LONGEST_FOLDER = 15
# For killed actors' processes and folders to go.
_STRAGGLERS_TIMEOUT_S = 3.0
_LOOK_S = 0.05


def find_moved(parts: Sequence[str] = tuple(PARTS)) -> list[str]:
    """List the parts that this Ray lacks, each with the feature that depends on it."""
    return [f"ray.{part} ({PARTS[part]})" for part in parts if _find(part) is None]


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have Ray listen on loopback alone if started in the block. Raises UnavailableError.

    By default Ray takes the machine's network address and listens on all addresses, so that other machines may join.
    This is Ray's own switch for systems without clusters; its children read it from the environment.
    """
    _require(_SWITCH, _IS_ON)
    with _replacing(False, _IS_ON), _environment({str(_find(_SWITCH)): "0"}):
        yield


@contextlib.contextmanager
def _replacing(value: Any, *parts: str) -> Iterator[None]:
    """Replace parts of Ray in the block. Raises UnavailableError."""
    _require(*parts)
    places = [(_find(part.rpartition(".")[0]), part.rpartition(".")[2]) for part in parts]
    before = [getattr(*place) for place in places]
    try:
        for place in places:
            setattr(*place, value)
        yield
    finally:
        for place, each in zip(places, before, strict=True):
            setattr(*place, each)


@contextlib.contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Change the environment for the block; None removes a variable."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def forget_token() -> None:
    """Make this process read Ray's token from the environment again; Ray reads it once. Raises UnavailableError."""
    _require(_CONFIG, _TOKENS)
    _find(_CONFIG)("")
    _find(_TOKENS)().reset_cache()


def _find(part: str) -> Any:
    return functools.reduce(lambda owner, name: getattr(owner, name, None), part.split("."), ray)


def _require(*parts: str) -> None:
    if moved := find_moved(parts):
        raise UnavailableError(
            f"Ray {ray.__version__} has no {', '.join(moved)}",
            "Install the Ray that this farm is tested with: the version is in requirements/all.txt.",
        )


class ActorLostError(PermanentError):
    """The process that should have answered is gone: killed, out of memory, or never started."""


@contextlib.contextmanager
def ray_running(cores: int) -> Iterator[None]:
    """Run a local Ray for the block, without traces after it. Raises UnavailableError where it cannot start."""
    prepare_environment()
    with _folder() as folder:
        try:
            # Auxiliary processes take 3.6 s of a core, half of Ray's start.
            without_servants = _replacing(lambda *_, **__: None, *_SERVANTS)
            with own_signal_handlers(), outside_folder(), on_loopback(), without_servants, _with_token():
                # `local`: RAY_ADDRESS in the environment could name a foreign cluster.
                ray.init(
                    address="local",
                    num_cpus=cores,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=256 << 20,
                    _temp_dir=str(folder),
                )
            yield
        except (ray.exceptions.RaySystemError, ConnectionError, TimeoutError) as error:
            raise UnavailableError(f"Ray cannot work here: {find_first_line(error)}", "Try `farm doctor`.") from error
        finally:
            ray.shutdown()
            forget_token()  # another Ray of this process, such as a cluster, has its own
            _end_stragglers(folder)
            lowering.remove_left(_STRAGGLERS_TIMEOUT_S)  # compilers may have been in the middle of a build


def prepare_environment() -> None:
    """Keep Ray quiet; call it before Ray is started or joined."""
    # No usage report over the network, no dashboard, no output of workers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Its processes work in another folder (`outside_folder`).
    os.environ.update(find_folders())
    # `ray job submit` sets these for its command alone; the engine that the command starts serves other users too.
    os.environ.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
    logging.getLogger("ray").setLevel(logging.ERROR)


@contextlib.contextmanager
def _with_token() -> Iterator[None]:
    """Give Ray a token if it starts in the block, so that only its own processes connect: other users reach loopback
    too.

    The token exists for this Ray only and is stored nowhere. Ray's own would be in the user's home, and
    RAY_AUTH_MODE=disabled in the environment would switch it off. Its children read it from the environment.
    """
    wanted = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_TOKEN_PATH": None}
    with _environment(wanted):
        forget_token()
        yield


@contextlib.contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Keep our signal handlers while Ray starts in the block, and handle a signal after it, some seconds later.

    Ray's own handlers would end the process without cleanup. A Ray interrupted while it starts leaves threads and
    clients that fault at the process's exit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(each, lambda number, frame: heard.append(number)) for each in signals]
    try:
        with _replacing(lambda handler: None, _HANDLER):
            yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
        if heard:
            signal.raise_signal(heard[0])


@contextlib.contextmanager
def outside_folder() -> Iterator[None]:
    """Work in `/` for the block, in which Ray starts: it puts the current folder on its workers' module path."""
    folder = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a private folder for Ray's sockets and logs, removed afterwards; also remove those of dead farms."""
    root = tempfile.gettempdir()
    if len(root) > _LONGEST_FOLDER and os.access("/tmp", os.W_OK):  # noqa: S108 - chosen for being short
        root = "/tmp"  # noqa: S108
    for left in Path(root).glob(f"{_PREFIX}*-*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not _is_alive(int(owner)) and _is_ours(left):
            _end_stragglers(left)  # on a busy machine they notice late that they are alone, and write until then
            _remove(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    (folder / _INNER).mkdir()
    try:
        yield folder / _INNER
    finally:
        _remove(folder)


def _is_ours(folder: Path) -> bool:
    """Whether this user made it: another user must not make us end processes or follow links."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def _is_alive(pid: int) -> bool:
    # Some containers have no init process: a killed one stays as a zombie with its number.
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _remove(folder: Path) -> None:
    """Remove a folder in which ending processes may still write."""
    deadline = time.monotonic() + _STRAGGLERS_TIMEOUT_S
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or time.monotonic() > deadline:  # then the next command removes it
            return
        time.sleep(_LOOK_S)


def _end_stragglers(folder: Path) -> None:
    """End what `ray.shutdown` leaves: processes that its own children were starting just then."""
    deadline = time.monotonic() + _STRAGGLERS_TIMEOUT_S
    while time.monotonic() < deadline:
        left = [process for process in psutil.process_iter() if _is_of_session(process, str(folder))]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def _is_of_session(process: psutil.Process, folder: str) -> bool:
    """Whether a process belongs to the Ray of this folder: all have its path among their arguments.

    Workers overwrite their arguments with a title, but by then they have seen their raylet and end with it.
    """
    try:
        return any(folder in argument for argument in process.cmdline()) and process.pid != os.getpid()
    except (psutil.Error, OSError):
        return False


def kill(actor: Any) -> None:
    """End an actor in any state; never raises for one that is gone."""
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor)


def call(method: Any, *arguments: Any) -> Future[Any]:
    """Call an actor's method. Never waits; `result` reads the answer."""
    answer: Future[Any] = method.remote(*arguments).future()
    return answer


def result(answer: Future[Any], what: str, timeout_s: float) -> Any:
    """Return a call's result; the farm's own errors are raised as they were in the actor.

    Raises DeadlineError naming `what` if it is not there, ActorLostError where the process died, PermanentError for
    foreign errors.
    """
    if not answer.done():
        raise DeadlineError(f"{what} did not finish within {timeout_s:g} s")
    try:
        return answer.result()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FarmError):
            raise error.cause from None
        raise PermanentError(f"{what} failed: {type(error.cause).__name__}: {find_first_line(error.cause)}") from error
    except ray.exceptions.RayError as error:
        raise ActorLostError(f"{what} failed: its process died: {find_first_line(error)}") from error
