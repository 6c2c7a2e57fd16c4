"""Notices: from an event of a real store to a real command, and to a real HTTP server that fails at first."""

from __future__ import annotations

import http.server
import json
import logging
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from farm.crew.health import Kind, Observation, decide_by
from farm.errors import FarmError, PermanentError, TransientError, UsageError
from farm.services.notices import Notice, Notifier, WayDocument, read_notices, send
from farm.settings import Settings
from farm.store import Store
from farm.values import Virtual
from tests.integration.conftest import wait_until

NOTICE = Notice("event-1", "campaign_over", 1.0, "vision", "finished")


class Server(http.server.ThreadingHTTPServer):
    """Answers with these codes, one after the other, then 200; None: not at all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.codes: list[int | None] = []
        self.got: list[dict[str, Any]] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook/s3cret?token=t0ken"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code is None:
            self.server.ended.wait()
            return
        if code == 200:
            self.server.got.append(json.loads(body) | {"path": self.path, "key": self.headers.get("X-Key")})
        self.send_response(code)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()


def configure(home: pathlib.Path, ways: dict[str, Any], mode: int = 0o600) -> Settings:
    path = home / "notices.yaml"
    path.write_text(json.dumps({"ways": ways}))
    path.chmod(mode)
    return Settings(home=str(home))


def quarantine(store: Store, name: str) -> None:
    store.boards.observe(name, Kind.QUARANTINE, "ana", decide_by(Observation(Kind.QUARANTINE, "smoke")))


def test_events_become_notices_over_a_restart(
    server: Server, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A webhook that fails twice gets it in the end, a command its own classes; events without running services
    are sent by the next services; no token is in the log.
    """
    said = tmp_path / "said"
    server.codes = [503, 429]
    hook = {"webhook": server.url, "headers": {"X-Key": "k3y"}, "classes": ["board_quarantined"]}
    mail = {"command": ["sh", "-c", f"cat >> {said}; echo >> {said}"]}
    settings = configure(tmp_path, {"chat": hook, "mail": mail})
    with Store(settings.store_location) as store, caplog.at_level(logging.INFO):
        for name in ("sim-1", "sim-2"):
            store.boards.register(name, "jetson-nano", Virtual(0))
        notifier = Notifier(settings, 0.02, 0.02)
        wait_until(lambda: sum(row.kind == "read_mark" for row in store.events.fetch()) == 2, "both to begin")
        quarantine(store, "sim-1")
        wait_until(lambda: server.got, "the webhook")
        store.events.add("campaign_finished", "vision", "100 trials are spent")
        wait_until(lambda: said.exists() and said.read_text().count("}") == 2, "the command")
        notifier.close()
        quarantine(store, "sim-2")
        notifier = Notifier(settings, 0.02, 0.02)
        wait_until(lambda: server.got[-1]["subject"] == "sim-2", "what happened meanwhile")
        wait_until(lambda: said.read_text().count("sim-2") == 1, "the command, too")
        notifier.close()
    assert [(each["class"], each["subject"], each["key"]) for each in server.got] == [
        ("board_quarantined", "sim-1", "k3y"),
        ("board_quarantined", "sim-2", "k3y"),
    ]
    documents = [json.loads(line) for line in said.read_text().splitlines() if line]
    assert [each["class"] for each in documents] == ["board_quarantined", "campaign_over", "board_quarantined"]
    assert "trying again" in caplog.text
    assert not [secret for secret in ("s3cret", "t0ken", "k3y") if secret in caplog.text]


@pytest.mark.parametrize(("code", "error"), [(500, TransientError), (404, PermanentError), (302, PermanentError)])
def test_what_a_server_answers_decides(server: Server, code: int, error: type[FarmError]) -> None:
    """Tried again, or given up at once; no redirect is followed."""
    server.codes = [code]
    with pytest.raises(error, match=str(code)) as caught:
        send(WayDocument(webhook=server.url), NOTICE)
    assert "s3cret" not in str(caught.value)
    assert server.got == []


def test_a_url_of_apprise_gets_a_text(server: Server) -> None:
    """Title and text arrive; what its service refuses is tried again; no secret leaks."""
    way = WayDocument(url=server.url.replace("http://", "json://"))
    assert way.shown == "url json://…"
    send(way, NOTICE)
    [got] = server.got
    assert (got["title"], got["message"]) == ("campaign_over: vision", "finished\nevent-1")
    server.codes = [500]
    with pytest.raises(TransientError, match="did not accept") as caught:
        send(way, NOTICE)
    assert "s3cret" not in str(caught.value)


def test_nobody_is_waited_for_longer_than_the_deadline(server: Server) -> None:
    """A server that does not answer, and a command that does not end."""
    server.codes = [None]
    with pytest.raises(TransientError, match="does not answer"):
        send(WayDocument(webhook=server.url), NOTICE, 0.5)
    with pytest.raises(TransientError, match="did not end"):
        send(WayDocument(command=["sh", "-c", "sleep 100"]), NOTICE, 0.5)
    with pytest.raises(TransientError, match="exit code 7"):
        send(WayDocument(command=["sh", "-c", "exit 7"]), NOTICE)
    with pytest.raises(PermanentError, match="cannot be run"):
        send(WayDocument(command=["/nonexistent"]), NOTICE)


@pytest.mark.parametrize(
    ("ways", "mode", "said"),
    [
        ({"a": {"command": ["x"], "klasses": []}}, 0o600, "did you mean classes"),
        ({"a": {"command": ["x"], "classes": ["campaign_ovr"]}}, 0o600, "campaign_over"),
        ({"a": {}}, 0o600, "needs one of `command`, `webhook` and `url`"),
        ({"a": {"webhook": "ftp://host/s3cret"}}, 0o600, "http:// or https://"),
        ({"a": {"webhook": "http://host/s3cret"}}, 0o644, "chmod 600"),
        ({"a": {"url": "nosuch://host/s3cret"}}, 0o600, "no URL of Apprise"),
        ({"../a": {"command": ["x"]}}, 0o600, "cannot be a way's name"),
    ],
)
def test_a_bad_file_is_explained(ways: dict[str, Any], mode: int, said: str, tmp_path: pathlib.Path) -> None:
    """By key, with a suggestion, and without what is secret; services go on without notices."""
    settings = configure(tmp_path, ways, mode)
    with pytest.raises(UsageError) as caught:
        read_notices(settings.home_path)
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)
    Notifier(settings).close()
    (tmp_path / "notices.yaml").unlink()
    assert read_notices(tmp_path) is None
