"""`farm board trust`, `exec` and `logs` over a real SSH server, as a user types them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pty
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from farm.store import Store
from farm.values import Ssh
from tests.acceptance.conftest import FARM, Home, new_home, wait_until
from tests.integration.sshd import Sshd, running_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def add(home: Home, sshd: Sshd, *names: str, host_key: str = "") -> None:
    address = sshd.address
    transport = Ssh(address.host, address.user, address.port, str(address.key_file), host_key)
    with Store(pathlib.Path(home.environment["FARM_HOME"]) / "farm.db") as store:
        for name in names:
            store.boards.register(name, "jetson-nano", transport)


@pytest.fixture
def fresh(sshd: Sshd) -> Iterator[Home]:
    with new_home() as home:
        add(home, sshd, "b1")
        yield home


@pytest.fixture(scope="module")
def trusted(sshd: Sshd) -> Iterator[Home]:
    with new_home() as home:
        add(home, sshd, "b1", "b2", host_key=sshd.host_key().fingerprint)
        assert home.run("board", "add", "sim", "--virtual", "jetson-nano").code == 0
        yield home


@pytest.mark.core
def test_without_a_terminal_an_unknown_key_is_refused_with_what_to_do(fresh: Home, sshd: Sshd) -> None:
    """The message names board, address, type and fingerprint, and the command that it gives does confirm the key."""
    done = fresh.run("board", "exec", "b1", "--", "true")
    assert done.code == 1
    fingerprint = sshd.host_key().fingerprint
    for part in ("b1", str(sshd.address), "ssh-ed25519", f"farm board trust b1 --fingerprint {fingerprint}"):
        assert part in done.err
    assert fresh.run("board", "trust", "b1", "--fingerprint", fingerprint).out == "b1: trusted\n"
    assert fresh.run("board", "exec", "b1", "--", "true").code == 0
    assert "is the pinned one" in fresh.run("board", "trust", "b1").out


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_a_key_of_any_type_is_accepted_by_its_fingerprint(fresh: Home, sshd: Sshd, kind: str) -> None:
    """A server shows one key of several; the farm asks for the type that was accepted."""
    assert fresh.run("board", "trust", "b1", "--fingerprint", sshd.host_key(kind).fingerprint).code == 0
    assert fresh.run("board", "exec", "b1", "--", "echo again").out == "again\n"


def test_a_fingerprint_of_another_key_is_refused(fresh: Home) -> None:
    """A wrong fingerprint shows that another machine answers; nothing is pinned."""
    done = fresh.run("board", "trust", "b1", "--fingerprint", "SHA256:" + "A" * 43)
    assert done.code == 1
    assert "none of those that you accept" in done.err
    assert fresh.run("board", "exec", "b1", "--", "true").code == 1


@pytest.mark.parametrize(
    ("answer", "code", "says"), [("yes", 0, "trusted"), ("y\r\nno", 2, "type yes, no"), ("FINGERPRINT", 0, "trusted")]
)
def test_on_a_terminal_a_person_is_asked(fresh: Home, sshd: Sshd, answer: str, code: int, says: str) -> None:
    """`yes` in full or the fingerprint itself confirms; anything else does not."""
    typed = answer.replace("FINGERPRINT", sshd.host_key().fingerprint)
    ended, said = run_on_terminal(fresh, ["board", "trust", "b1"], "Trust it?", typed)
    assert ended == code, said
    assert says in said
    assert sshd.host_key().fingerprint in said.replace("\r\n", "")


def test_a_changed_key_is_refused_loudly_until_it_is_forgotten(tmp_path: pathlib.Path) -> None:
    """No option of another command gets past it: the old pin has to be taken away by name."""
    with running_sshd(tmp_path / "sshd") as server, new_home() as home:
        add(home, server, "b1")
        old = server.host_key().fingerprint
        assert home.run("board", "trust", "b1", "--fingerprint", old).code == 0
        server.stop()
        server.renew_host_keys()
        server.start()
        new = server.host_key().fingerprint
        for words in (
            ("board", "exec", "b1", "--", "true"),
            ("board", "trust", "b1", "--fingerprint", new),
            ("board", "trust", "b1"),
        ):
            done = home.run(*words)
            assert done.code == 1, done.err
            assert "HAS CHANGED" in done.err
            assert new in done.err
        assert "no longer trusted" in home.run("board", "trust", "b1", "--forget").out
        assert home.run("board", "trust", "b1", "--fingerprint", new).code == 0
        assert home.run("board", "exec", "b1", "--", "true").code == 0


def test_a_command_s_output_and_code_are_its_own(trusted: Home) -> None:
    """Bytes come as they are, on the stream that they were written to; a failing command is not an error of ours."""
    done = trusted.run("board", "exec", "b1", "--", "printf 'a\\001b'; echo oops >&2; exit 7")
    assert (done.code, done.out, done.err) == (7, "a\x01b", "oops\n")


def test_several_words_reach_the_program_as_they_are(trusted: Home) -> None:
    """No shell of the board's takes them apart again, and options after `--` are the program's."""
    done = trusted.run("board", "exec", "b1", "--", "printf", "%s|", "a b", "$HOME", "--json")
    assert (done.code, done.out) == (0, "a b|$HOME|--json|")


@pytest.mark.core
def test_several_boards_print_with_their_names(trusted: Home) -> None:
    """The worst exit code wins; with --json each board has its own."""
    done = trusted.run("board", "exec", "b1", "b2", "--timeout", "20s", "--", "echo hello; exit 3")
    assert done.code == 3
    assert sorted(done.out.splitlines()) == ["b1: hello", "b2: hello"]
    documents = trusted.run("board", "exec", "--json", "b2", "b1", "--", "echo hello").json()
    assert [(one["board"], one["code"], one["stdout"]) for one in documents] == [
        ("b2", 0, "hello\n"),
        ("b1", 0, "hello\n"),
    ]


def test_a_command_that_overruns_is_ended(trusted: Home) -> None:
    """On the board too; the error names what was waited for, and the exit code is that of a deadline."""
    began = time.monotonic()
    done = trusted.run("board", "exec", "b1", "--timeout", "1s", "--", "sleep 87")
    assert done.code == 3
    assert "sleep 87" in done.err
    assert time.monotonic() - began < 20


def test_ctrl_c_ends_what_runs_on_boards(trusted: Home, sshd: Sshd) -> None:
    """The command is back in seconds at any time-out, and leaves no connection."""
    running = trusted.start("board", "exec", "b1", "b2", "--timeout", "10m", "--", "exec sleep 543")
    wait_until(lambda: count_running(sshd, "543") >= 2, "both commands")
    began = time.monotonic()
    running.send(signal.SIGINT)
    assert running.wait().code == 130
    assert time.monotonic() - began < 10
    wait_until(lambda: not sshd.sessions(), "the connections to end")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        pytest.param("exec b1", 2, "-- COMMAND", id="no-command"),
        pytest.param("exec b7 -- true", 2, "no board 'b7'", id="unknown-board"),
        pytest.param("exec sim -- true", 2, "virtual board", id="virtual"),
        pytest.param("trust sim", 2, "virtual board", id="trust-virtual"),
        pytest.param("exec b1 --timeout never -- true", 2, "is not a duration", id="bad-timeout"),
        pytest.param("trust b1 --fingerprint abc", 2, "no fingerprint", id="bad-fingerprint"),
        pytest.param("trust b1 --forget --fingerprint abc", 2, "contradict", id="both"),
        pytest.param("logs b1 --lines 0", 2, "lines", id="no-lines"),
        pytest.param("logs sim", 3, "no log yet", id="no-log-of-a-virtual-board"),
    ],
)
def test_bad_input_is_refused(trusted: Home, words: str, code: int, says: str) -> None:
    """What was wrong, and no traceback."""
    done = trusted.call("board", *words.split())
    assert done.code == code, done.err
    assert says in done.err
    assert "Traceback" not in done.err


def test_logs_are_the_ends_of_both_files(trusted: Home, tmp_path: pathlib.Path) -> None:
    """Where no systemd keeps them: the supervisor's files, or a clear word that there are none."""
    if pathlib.Path("/run/systemd/system").exists():
        pytest.skip("this machine has systemd, whose journal would be shown")
    (tmp_path / "log").mkdir()
    (tmp_path / "log/agent.log").write_text("".join(f"agent {n}\n" for n in range(50)))
    (tmp_path / "log/clock-helper.log").write_text("helper\n")
    done = trusted.run("board", "logs", "b1", "--lines", "2", "--prefix", str(tmp_path))
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        f"==> {tmp_path}/log/agent.log <==",
        "agent 48",
        "agent 49",
        f"==> {tmp_path}/log/clock-helper.log <==",
        "helper",
    ]
    done = trusted.run("board", "logs", "b1", "--prefix", str(tmp_path / "elsewhere"))
    assert done.code == 1
    assert "no logs of an agent" in done.err


def count_running(sshd: Sshd, word: str) -> int:
    count = 0
    for process in sshd.processes():
        with contextlib.suppress(psutil.Error):
            count += word in process.cmdline()
    return count


def run_on_terminal(home: Home, words: list[str], prompt: str, answer: str) -> tuple[int, str]:
    """Run `farm` on a terminal of its own, answer once `prompt` is there; its exit code and all that was shown."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(FARM), *words],
        env=home.environment | {"COLUMNS": "400", "TERM": "dumb"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    os.set_blocking(master, False)
    said = bytearray()

    def read() -> bytes:
        with contextlib.suppress(OSError):  # nothing yet, or the other end is closed
            said.extend(os.read(master, 1 << 16))
        return bytes(said)

    try:
        wait_until(lambda: prompt.encode() in read() or process.poll() is not None, f"{prompt!r}")
        os.write(master, answer.replace("\r\n", "\n").encode() + b"\n")
        wait_until(lambda: (read(), process.poll() is not None)[1], "the command to end")
        read()
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return process.returncode, said.decode(errors="replace")


def test_json_has_no_place_for_questions(fresh: Home) -> None:
    """A board that is not confirmed is one failed board in the document, and stdout is that document alone."""
    done = fresh.run("board", "exec", "--json", "b1", "--", "true")
    [document] = json.loads(done.out)
    assert done.code == 1
    assert document["code"] is None
    assert "not confirmed yet" in document["error"]
