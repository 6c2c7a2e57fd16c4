"""Logs of real processes: written in one form, followed on this machine and over SSH."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading

import psutil

from farm.connectivity.board_logs import plan_follow_command
from farm.connectivity.ssh import SshConnection
from farm.errors import FarmError
from farm.processes.home_log import LogFilter, read_log
from tests.integration.conftest import wait_until
from tests.integration.sshd import running_sshd


def write(path: pathlib.Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def test_the_command_follows_and_is_harmless(tmp_path: pathlib.Path) -> None:
    """`farm logs --follow` prints what was and what comes; control characters of others are shown, not sent."""
    home = tmp_path
    (home / "logs").mkdir()
    write(home / "logs" / "farm.log", json.dumps({"at": 1.0, "process": "services", "text": "\x1b]0;gone\x07"}))
    command = [sys.executable, "-c", "from farm.cli.main import main; main()", "logs", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"FARM_HOME": str(home)}) as process:
        first = process.stdout.readline()
        assert b"\\x1b]0;gone\\x07" in first
        assert b"\x1b" not in first
        write(home / "logs" / "farm.log", json.dumps({"at": 2.0, "process": "services", "text": "then"}))
        assert b"then" in process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 0


def test_processes_log_to_one_file(tmp_path: pathlib.Path) -> None:
    """Several processes append to the log at the same time, while it is rotated: no line is lost or cut."""
    script = (
        "import logging, pathlib, sys; from farm.processes import home_log; home_log._BYTES = 12_000;"
        "home_log.start_log(sys.argv[2], pathlib.Path(sys.argv[1]));"
        "[logging.getLogger('x').info('found %d', n, extra={'campaign': 'vision'}) for n in range(150)]"
    )
    names = ("search", "engine")
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in names]
    assert [each.wait(60) for each in started] == [0, 0]
    lines = read_log(tmp_path, LogFilter(campaign="vision"))
    assert len(list(tmp_path.glob("farm.log.*"))) > 1
    for name in names:
        assert [line.text for line in lines if line.process == name] == [f"found {n}" for n in range(150)]


def test_a_boards_log_is_followed_over_ssh(tmp_path: pathlib.Path) -> None:
    """Its last lines, then what comes, also after it was moved aside; hanging up ends it on the board."""
    prefix = tmp_path / "board"
    (prefix / "log").mkdir(parents=True)
    log = prefix / "log" / "agent.log"
    write(log, "one", "two", "three")
    heard: list[bytes] = []
    with running_sshd(tmp_path) as server, SshConnection.connect(server.pinned) as connection:
        command = plan_follow_command(2, str(prefix))
        thread = threading.Thread(target=lambda: _stream(connection, command, heard))
        thread.start()
        wait_until(lambda: b"three\n" in b"".join(heard), "what was there")
        assert b"one" not in b"".join(heard)
        write(log, "four")
        wait_until(lambda: b"four\n" in b"".join(heard), "what came")
        log.rename(log.with_name("agent.log.1"))
        write(log, "five")
        wait_until(lambda: b"five\n" in b"".join(heard), "what came after it was moved")
        assert _find_tails(log)
        connection.close()
        thread.join(20)
        assert not thread.is_alive()
        wait_until(lambda: not _find_tails(log), "it to end on the board")


def test_a_board_without_logs_says_so(tmp_path: pathlib.Path) -> None:
    """Exit code 3, and where it was looked."""
    said: list[bytes] = []
    with running_sshd(tmp_path) as server, SshConnection.connect(server.pinned) as connection:
        command = plan_follow_command(2, str(tmp_path / "nowhere"))
        assert connection.stream(command, lambda out, err: said.append(err), 30.0) == 3
    assert b"no logs of an agent" in b"".join(said)


def _stream(connection: SshConnection, command: str, heard: list[bytes]) -> None:
    try:
        connection.stream(command, lambda out, err: heard.append(out), 30.0)
    except FarmError:  # the connection was closed
        heard.append(b"")


def _find_tails(log: pathlib.Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[:1] == ["tail"] and str(log) in words:
            found.append(process)
    return found
