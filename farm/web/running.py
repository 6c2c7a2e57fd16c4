"""The process that serves the page of a FARM_HOME: find and start it. Loads no part of the server."""

from __future__ import annotations

from pathlib import Path

from farm.processes.home_process import HomeProcess

# It publishes its `url`.
WEB = HomeProcess(
    name="web",
    title="the page's server",
    module="farm.web",
    refusal=("the farm's page is served already", "`farm web --url` says where."),
    start_timeout_s=30.0,
    stop_timeout_s=10.0,
)


def find_url(home: Path) -> str | None:
    """Return the page's address; None where no process serves it."""
    return (WEB.find(home) or {}).get("url")


def start(home: Path) -> str:
    """Start a process that serves the page until it is stopped; return the address.

    Raises UnavailableError, DeadlineError.
    """
    return WEB.ensure(home, lambda _: find_url(home), lambda: WEB.start(home))
