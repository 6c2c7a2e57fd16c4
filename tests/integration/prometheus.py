"""A real Prometheus for tests: by the example's configuration and rules, looking every second."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.conftest import ROOT
from tests.ports import find_free_port

DEPLOY = ROOT / "deploy" / "prometheus"
Ask = Callable[[str], list[dict[str, Any]]]


def require(program: str) -> str:
    """The path of one of Prometheus' programs. Skips without, and fails where FARM_REQUIRE_PROMETHEUS is set."""
    if path := shutil.which(program):
        return path
    reason = f"{program} is not installed (Debian: apt-get install prometheus)"
    if os.environ.get("FARM_REQUIRE_PROMETHEUS"):
        pytest.fail(reason)
    pytest.skip(reason)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@contextlib.contextmanager
def prometheus_server(
    folder: pathlib.Path, metrics_port: int, change: tuple[str, str] = ("groups:", "groups:")
) -> Iterator[Ask]:
    """A server by the example's configuration and rules, which looks every second; `change`: a text in the rules."""
    prometheus = require("prometheus")
    text = (DEPLOY / "prometheus.yml").read_text()
    for old, new in (
        ("127.0.0.1:9464", f"127.0.0.1:{metrics_port}"),
        ("scrape_interval: 15s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
        ("refresh_interval: 30s", "refresh_interval: 1s"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text)
    rules = (DEPLOY / "tvm-farm.rules.yml").read_text()
    assert rules.count(change[0]) == 1
    (folder / "tvm-farm.rules.yml").write_text(rules.replace(*change))
    port = find_free_port()
    command = [prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, cwd=folder
        )

    def ask(query: str) -> list[dict[str, Any]]:
        with contextlib.suppress(ConnectionError, urllib.error.URLError):
            url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
            return list(json.loads(fetch(url))["data"]["result"])
        return []

    try:
        yield ask
    finally:
        server.kill()
        server.wait()
