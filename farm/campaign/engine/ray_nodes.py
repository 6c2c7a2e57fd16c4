"""The engine's Ray: its own, or the cluster that FARM_RAY_ADDRESS names.

Which machines there are, and where an actor is placed. Searches and the connections of boards stay on the engine's
machine (`here`), because tunnels end there; `builds` uses the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from device_agent.protocol.interpreters import python_command
from farm.campaign.engine.ray_calls import outside_folder, own_signal_handlers, prepare_environment, ray_running
from farm.campaign.engine.state import leave_last_words
from farm.errors import FarmError, UnavailableError, UsageError
from farm.settings import Settings

# How often the node manager is checked.
_LOOK_S = 1.0
# How long the engine of a dead Ray has to end in order, with its campaigns noted; then its process is ended.
_GRACE_S = 15.0
# As for other parts of the farm that are missing.
_EXIT_CODE = 3

_log = logging.getLogger(__name__)
# A port without a listener refuses at once or never answers.
_PORT_TIMEOUT_S = 5.0
# Ray itself would try for two minutes; a working cluster answers in three seconds.
_CLUSTER_TIMEOUT_S = 45.0
# Ray's log message for a wrong token.
_TOKEN_WORDS = "InvalidAuthToken"  # noqa: S105 - no password
# Every node has its id as a label.
_NODE_LABEL = "ray.io/node-id"
# Amount of the resource per compiler: CPUs are the limit, not the resource.
_SHARE = 0.001
_ADDRESS = re.compile(r"\[?(?P<host>[\w.:-]+?)\]?:(?P<port>\d{1,5})")


@contextlib.contextmanager
def ray_watched(raylet_socket: str, tell: Callable[[str], None], grace_s: float = _GRACE_S) -> Iterator[None]:
    """Watch Ray's node manager and, where it runs here, its head during the block: if one dies and the block does not
    end in `grace_s`, end the process.

    The process and its children end as if killed. The store has its state; `tell` saves the reason. The node manager is
    known by its socket's path, the head by the session's folder above it. Raises UnavailableError for any error of the
    farm's that such a death ends the block with.
    """
    session = pathlib.PurePath(raylet_socket).parents[1]
    processes = {
        "node manager": _find_process("", f"--raylet_socket_name={raylet_socket}"),
        "head": _find_process("gcs_server", f"--session-dir={session}"),
    }
    over, found = threading.Event(), threading.Event()

    def describe_death() -> str:
        """Name the process that has died; "" while all live. The cause is unknown; out of memory is a common one."""
        dead = (f"{name} (pid {each.pid})" for name, each in processes.items() if each and not _is_alive(each))
        return next((f"Ray's {each} died; where memory runs out the kernel kills it" for each in dead), "")

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if words := describe_death():
                found.set()
                _log.error("%s", words)
                tell(words)
                if not over.wait(grace_s):
                    _log.error("Ray does not shut down, so the engine ends; `farm campaign resume` goes on")
                    logging.shutdown()
                    os._exit(_EXIT_CODE)
                return

    threading.Thread(target=watch, name="farm-ray-watch", daemon=True).start()
    try:
        yield
    except FarmError as error:
        if words := describe_death():
            raise UnavailableError(words, "A campaign goes on with `farm campaign resume`.") from error
        raise
    finally:
        if not found.is_set():  # where Ray has died, its shutdown has the grace period too
            over.set()


def _find_process(program: str, argument: str) -> psutil.Process | None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if argument in command and program in command[0]:
                return process
    return None


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@dataclasses.dataclass(frozen=True)
class RayNode:
    """A machine of the cluster. `is_here`: the engine runs there too."""

    id: str
    name: str
    is_here: bool


@contextlib.contextmanager
def farm_ray(settings: Settings, cores: int) -> Iterator[None]:
    """Run Ray for the block: with `cores` cores of this machine, or the cluster of `settings.ray_address`.

    Raises UsageError for an invalid address, UnavailableError where Ray cannot start or the cluster cannot be used. A
    cluster outlives the block; only the actors started in it end.
    """
    tell = functools.partial(leave_last_words, settings.home_path)
    if not settings.ray_address:
        with ray_running(cores), ray_watched(_find_socket(), tell):
            yield
        return
    address = require_address(settings.ray_address)
    prepare_environment()
    _require_cluster(address)
    try:
        try:
            with own_signal_handlers(), outside_folder():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ray.exceptions.RaySystemError, ray.exceptions.AuthenticationError, OSError, RuntimeError) as error:
            raise _unusable(address, str(error)) from error
        with ray_watched(_find_socket(), tell):
            yield
    except ray.exceptions.RaySystemError as error:
        raise _unusable(address, str(error)) from error
    finally:
        ray.shutdown()


def require_address(text: str) -> str:
    """Check that `text` is Ray's `host:port`. Raises UsageError."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) <= 65535:
        raise UsageError(
            f"FARM_RAY_ADDRESS={text!r} is not the address of a Ray cluster",
            "It is HOST:PORT, as `ray start --head` prints it; ray:// addresses do not do, because this machine has "
            "to be a node itself.",
        )
    return text.strip()


def here() -> dict[str, Any]:
    """Return options that keep an actor on the engine's machine."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(_own_id(), soft=False)}


def elsewhere(label: str, refused: Collection[str] = ()) -> dict[str, Any]:
    """Return options that place an actor on a CPU of another machine.

    It offers the resource `label`, if one is named, and is none of the `refused`. An autoscaler without such a machine
    starts one.
    """
    others = f"!in({','.join(sorted({_own_id(), *refused}))})"
    resources = {"resources": {label: _SHARE}} if label else {}
    return {"num_cpus": 1, "label_selector": {_NODE_LABEL: others}, **resources}


def fetch_nodes() -> list[RayNode]:
    """Return the machines that are up, the engine's own first."""
    own = _own_id()
    nodes = [
        RayNode(
            id=str(node["NodeID"]),
            name=f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            is_here=node["NodeID"] == own,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: not node.is_here)


def _own_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _find_socket() -> str:
    return next(str(node["RayletSocketName"]) for node in ray.nodes() if node["NodeID"] == _own_id())


def _require_cluster(address: str) -> None:
    """Check that the cluster accepts us, in a separate process: Ray's wait cannot be ended otherwise."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PORT_TIMEOUT_S).close()
    except OSError as error:
        raise _unusable(address, f"nothing answers there: {error}") from error
    # without TVM and the rest of the farm: a second at most
    script = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
    command = python_command("-c", script, address)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(_CLUSTER_TIMEOUT_S, process.kill)
        timer.start()
        try:
            lines: list[str] = []
            for line in process.stderr or ():
                lines.append(line.strip())
                if _TOKEN_WORDS in line:  # it would go on trying for 20 s
                    break
            else:
                if process.wait() == 0:
                    return
        finally:
            timer.cancel()
            process.kill()
    said = "\n".join(line for line in lines if line)
    raise _unusable(address, said or f"no answer within {_CLUSTER_TIMEOUT_S:g} s")


def _unusable(address: str, said: str) -> UnavailableError:
    """Turn Ray's message into an error with advice."""
    lines = said.splitlines() or [""]
    what, hint = lines[-1], "docs/howto/build-on-many-machines.md says what its machines need."
    if _TOKEN_WORDS in said or "AuthenticationError" in said:
        what = "its token is another, or none is set here"
        hint = "Give this machine the cluster's token: RAY_AUTH_TOKEN, or the file that RAY_AUTH_TOKEN_PATH names."
    elif "ersion mismatch" in said:
        what = " ".join(line.strip() for line in lines[-8:] if "Ray:" in line or "Python:" in line) or what
        what = f"its versions are not ours: {what}"
        hint = "All its machines need the same Python, Ray and tvm-farm as this one."
    elif "nothing answers" in said:
        hint = "Start its head with `ray start --head`, or unset FARM_RAY_ADDRESS to build on this machine alone."
    elif "o node" in said or "raylet" in said.lower():
        what = f"this machine is no node of it: {what}"
        hint = f"Make it one: ray start --address={address}"
    return UnavailableError(f"the Ray cluster at {address} cannot be used: {what[:300]}", hint)
