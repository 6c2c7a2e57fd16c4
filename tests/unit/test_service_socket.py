"""A clock helper whose folder is closed to the client: the SSH login of a board with the system's service."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator

import pytest

from device_agent import agent

_NOBODY = 65534


@contextlib.contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Files are closed to root's tests too, for the length of the block."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("command", ["clocks show", "describe", "doctor"])
def test_a_login_that_is_shut_out_is_told(
    command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says that the helper's socket refuses this user, and goes on; it does not fail with an errno."""
    agent.main([*command.split(), "--json"])  # what it imports may be closed to an ordinary user, too
    capsys.readouterr()
    folder = tmp_path / "run"
    folder.mkdir(mode=0o000)
    monkeypatch.setattr(agent, "SERVICE_SOCKET", str(folder / "clock-helper.sock"))
    with as_an_ordinary_user():
        code = agent.main([*command.split(), "--json"])
    said = capsys.readouterr()
    assert "Errno" not in said.err
    document = json.loads(said.out)
    if command == "doctor":
        (helper,) = (check for check in document["checks"] if check["name"] == "clock helper")
        assert helper["level"] == "warning"
        assert "refuses this user" in helper["message"]
    else:
        assert code == 0
    if command == "clocks show":
        assert any("refuses this user" in note for note in document["notes"])
    folder.chmod(0o700)
