"""What the page costs: server time of Now, a campaign and a sweep (500 boards, 100,000 trials), how soon a browser
has drawn Now, and what 50 watching pages and one that never reads take, in a file and on PostgreSQL.

The store is made by the tests' own (`tests/web_store.py`); the server is `farm web` as its users start it. `first` is
the first look after the server began, which reads what later ones know.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import _machine
import psutil

from farm.settings import StoreLocation
from farm.store import Store
from tests import web_store

PAGES = {"now": "/", "campaign": f"/campaigns/{web_store.CAMPAIGN}", "sweep": "/sweeps/1"}
_READY_S = 120.0


@contextlib.contextmanager
def serving(home: pathlib.Path, place: StoreLocation) -> Iterator[tuple[str, int, psutil.Process]]:
    """`farm web` on a store; address and process."""
    environment = os.environ | {"FARM_HOME": str(home)} | ({"FARM_STORE": place} if isinstance(place, str) else {})
    farm = pathlib.Path(sys.executable).with_name("farm")
    with subprocess.Popen(
        [str(farm), "web", "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            url = urllib.parse.urlsplit(process.stderr.readline().rpartition(" ")[2].strip())
            yield url.hostname or "", url.port or 0, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def fetch(host: str, port: int, path: str) -> float:
    """Seconds from the request to the last byte of the answer."""
    connection = http.client.HTTPConnection(host, port, timeout=_READY_S)
    started = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    seconds = time.perf_counter() - started
    connection.close()
    assert answer.status == 200, (path, answer.status)
    return seconds


def measure_pages(host: str, port: int, rounds: int) -> dict[str, Any]:
    """Each page once, and then by turns."""
    first = {name: fetch(host, port, path) for name, path in PAGES.items()}
    times: dict[str, list[float]] = {name: [] for name in PAGES}
    for _ in range(rounds):
        for name, path in PAGES.items():
            times[name].append(fetch(host, port, path))
    return {name: {"first_ms": round(first[name] * 1e3, 1), "ms": _machine.spread(times[name], 1e3)} for name in PAGES}


def watch(host: str, port: int) -> socket.socket:
    """A page's connection for updates; its answer has begun."""
    sock = socket.create_connection((host, port), timeout=_READY_S)
    sock.sendall(f"GET /live HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    assert b"200 OK" in sock.recv(4096)
    return sock


def measure_watching(
    store: Store, host: str, port: int, server: psutil.Process, watchers: int, seconds: float
) -> dict[str, Any]:
    """A trial a second and an event now and then, seen by many; one of the watchers never reads."""
    socks = [watch(host, port) for _ in range(watchers)]
    stuck = watch(host, port)
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for sock in socks:
        sock.setblocking(False)
    time.sleep(2)
    before, began = server.cpu_times(), time.monotonic()
    memory = server.memory_info().rss
    received, turn = 0, 0
    while time.monotonic() - began < seconds:
        web_store.add_trial_now(store)
        turn += 1
        if turn % 10 == 0:
            store.events.add("search_remark", web_store.CAMPAIGN, f"remark {turn}")
        time.sleep(1.0)
        for sock in socks:
            with contextlib.suppress(BlockingIOError):
                received += len(sock.recv(1 << 20))
    after, took = server.cpu_times(), time.monotonic() - began
    answered = fetch(host, port, "/")
    growth = server.memory_info().rss - memory
    for sock in (*socks, stuck):
        sock.close()
    assert received
    return {
        "watchers": watchers,
        "seconds": round(took),
        "core_percent": round(100 * (after.user + after.system - before.user - before.system) / took, 1),
        "growth_mb": round(growth / 1e6, 1),
        "received_kb_per_watcher": round(received / watchers / 1e3, 1),
        "now_ms_meanwhile": round(answered * 1e3, 1),
    }


def measure_drawing(host: str, port: int) -> dict[str, float] | None:
    """From the first byte of Now to its first contentful paint, in a browser; None without chromium."""
    program = shutil.which("chromium")
    if program is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(f"http://{host}:{port}/")
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
        first_byte, painted, whole = page.evaluate(
            "() => { const it = performance.getEntriesByType('navigation')[0]; return [it.responseStart, "
            "performance.getEntriesByName('first-contentful-paint')[0].startTime, it.loadEventEnd] }"
        )
        browser.close()
    return {"first_paint_ms": round(painted - first_byte, 1), "whole_ms": round(whole - first_byte, 1)}


def measure(place: StoreLocation, home: pathlib.Path, options: Any) -> dict[str, Any]:
    """All of it on one database."""
    started = time.perf_counter()
    with Store(place) as store:
        web_store.fill(store, boards=options.boards, trials=options.trials)
        fill_s = time.perf_counter() - started
        if isinstance(place, str):  # autovacuum would within a minute
            with store.session.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                connection.exec_driver_sql("VACUUM ANALYZE")
        with serving(home, place) as (host, port, server):
            figures = {"fill_s": round(fill_s, 1), "pages": measure_pages(host, port, options.rounds)}
            figures["drawing"] = measure_drawing(host, port)
            figures["watching"] = measure_watching(store, host, port, server, options.watchers, options.seconds)
    return figures


@contextlib.contextmanager
def open_server() -> Iterator[str]:
    """A database of PostgreSQL."""
    from tests import postgresql

    with postgresql.running() as cluster:
        yield cluster.make(empty=True)


def main() -> None:
    """Run everything and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", type=int, default=500, help="virtual boards (default: 500)")
    parser.add_argument("--trials", type=int, default=100_000, help="trials of the campaign (default: 100,000)")
    parser.add_argument("--rounds", type=int, default=20, help="looks at each page (default: 20)")
    parser.add_argument("--watchers", type=int, default=50, help="watching pages (default: 50)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for which they watch (default: 600)")
    parser.add_argument("--only", choices=("sqlite", "postgresql"), help="one of both")
    options = parser.parse_args()
    if options.quick:
        options.boards, options.trials, options.rounds, options.watchers, options.seconds = 40, 3000, 3, 5, 5.0
    with _machine.only_json() as emit, _machine.scratch() as folder:
        figures: dict[str, Any] = {"machine_quiet": _machine.wait_until_quiet(options.quick)}
        home = pathlib.Path(folder)
        if options.only != "postgresql":
            figures["sqlite"] = measure(home / "farm.db", home, options)
        if options.only != "sqlite":
            with open_server() as place:
                figures["postgresql"] = measure(place, home / "other", options)
        figures["load_1min_after"] = round(os.getloadavg()[0], 2)
        emit("web_pages", vars(options), figures)


if __name__ == "__main__":
    main()
