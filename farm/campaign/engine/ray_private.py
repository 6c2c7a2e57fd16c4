"""What the farm takes from inside Ray, where nothing is promised to stay: all of it is here, and looked for by name.

Each part has its reason in `PARTS`; a Ray that has moved one is refused by its name, and a test names it first.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from farm.errors import UnavailableError

_CONSTANTS, _UTILS = "_private.ray_constants", "_private.utils"
_SWITCH, _IS_ON = f"{_CONSTANTS}.ENABLE_RAY_CLUSTERS_ENV_VAR", f"{_CONSTANTS}.ENABLE_RAY_CLUSTER"
_HANDLER = f"{_UTILS}.set_sigterm_handler"
_CONFIG, _TOKENS = "_raylet.Config.initialize", "_raylet.AuthenticationTokenLoader.instance"
_NODE = "_private.node.Node"
# Each is a process that imports all of Ray, and is nothing to a Ray of one machine whose dashboard is off: one reads
# workers' output to show it to the driver, one asks a cloud for machines, one serves the dashboard.
_SERVANTS = tuple(f"{_NODE}.{name}" for name in ("start_log_monitor", "start_monitor", "start_api_server"))

# Below `ray`; and what of the farm needs it.
PARTS = {
    _SWITCH: "a Ray of our own listens on loopback alone",
    _IS_ON: "a Ray of our own listens on loopback alone",
    _HANDLER: "signals while Ray starts are ours",
    _CONFIG: "each Ray has a token of its own",
    _TOKENS: "each Ray has a token of its own",
    **dict.fromkeys(_SERVANTS, "a Ray of our own starts no process that nobody needs"),
}


def find_moved(parts: Sequence[str] = tuple(PARTS)) -> list[str]:
    """What this Ray does not have where the farm looks for it, each with what needs it."""
    return [f"ray.{part} ({PARTS[part]})" for part in parts if _find(part) is None]


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have a Ray that is started in the block listen on loopback alone. Raises UnavailableError.

    Where the machine has a network, Ray takes its address there for the node's and listens on all of them, so that
    others may join, which nobody may here. This is the switch by which it does not on systems that it has no clusters
    on; its children read it from the environment.
    """
    _require(_SWITCH, _IS_ON)
    constants = _find(_CONSTANTS)
    name: str = _find(_SWITCH)
    before, os.environ[name] = os.environ.get(name), "0"
    known, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = known
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def without_servants() -> Iterator[None]:
    """Have a Ray that is started in the block do without what it starts for others: 3.6 s of a core, half of its start.

    Raises UnavailableError.
    """
    _require(*_SERVANTS)
    node = _find(_NODE)
    names = [part.rpartition(".")[2] for part in _SERVANTS]
    before = {name: getattr(node, name) for name in names}
    try:
        for name in names:
            setattr(node, name, lambda *_, **__: None)
        yield
    finally:
        for name, method in before.items():
            setattr(node, name, method)


@contextlib.contextmanager
def without_handlers() -> Iterator[None]:
    """Keep Ray from putting a handler of its own in place for SIGTERM. Raises UnavailableError."""
    _require(_HANDLER)
    utils = _find(_UTILS)
    setter, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = setter


def forget_token() -> None:
    """Have this process read from its environment anew how Ray lets it in, which Ray reads once.

    Raises UnavailableError.
    """
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
