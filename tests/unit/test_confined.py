"""A confined process: what it may do, and what comes of it."""

from __future__ import annotations

import os
import pathlib
import time

import pytest

from farm.errors import ModelRefusedError, UsageError
from farm.processes import confined

_DEEDS = """
import ctypes, os, signal, socket, subprocess, threading, time
from farm.errors import ModelRefusedError

def backwards(payload):
    return payload[::-1]

def peek(payload):
    return open(payload, "rb").read()

def threads(payload):
    found = []
    thread = threading.Thread(target=found.append, args=(b"done",))
    thread.start(); thread.join()
    return found[0]

def refuse(payload):
    raise ModelRefusedError("no such operator", "Leave it out.")

def stumble(payload):
    raise KeyError("weights")

def attempt(payload):
    def fork():
        if os.fork() == 0:
            os._exit(0)
    def clone3():
        arguments = (ctypes.c_uint64 * 8)()
        if ctypes.CDLL(None, use_errno=True).syscall(435, arguments, 64) < 0:
            raise OSError
    path, pid = payload.decode().split()
    attempts = {
        "reads": lambda: open(path).read(),
        "lists": lambda: os.listdir(os.path.dirname(path)),
        "writes": lambda: open(path + ".new", "w"),
        "removes": lambda: os.unlink(path),
        "connects": lambda: socket.create_connection(("127.0.0.1", 9)),
        "opens a socket": lambda: socket.socket(socket.AF_UNIX),
        "forks": fork,
        "runs": lambda: subprocess.run(["/bin/true"]),
        "clones": clone3,
        "kills": lambda: os.kill(int(pid), 0),
        "leaves its group": os.setsid,
        "sees a variable": lambda: os.environ["FARM_CONFINED_TEST"],
        "raises its limit": lambda: __import__("resource").setrlimit(2, (-1, -1)),
        "looks into its parent": lambda: open(f"/proc/{pid}/environ", "rb").read()[0],
    }
    if os.geteuid() == 0:
        attempts.pop("raises its limit")
    done = []
    for name, deed in attempts.items():
        try:
            deed()
        except (OSError, KeyError, ValueError, IndexError):
            continue
        done.append(name)
    open("own", "w").write("own")
    return ", ".join(done).encode()

def crash(payload):
    ctypes.string_at(0)

def hang(payload):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

def eat(payload):
    return bytes(8 << 30)

def link(payload):
    os.symlink(payload, "answer")
    os._exit(0)

def pretend(payload):
    open("error.json", "w").write('["SystemExit", "x", ""]')
    os._exit(1)
"""


def _call(name: str, payload: bytes = b"", **limits: float) -> bytes:
    # Its own functions are what the process runs: this folder has to be one of its module folders.
    limited = confined.ConfinedLimits(**({"timeout_s": 60.0, "memory_bytes": 1 << 30} | limits))  # type: ignore[arg-type]
    return confined.call(f"confined_deeds:{name}", payload, "the file was not read", limited)


@pytest.fixture(autouse=True)
def _deeds(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The functions that the process runs, in a folder that it may read, as it may site-packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "confined_deeds.py").write_text(_DEEDS)
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("FARM_CONFINED_TEST", "secret")


def test_bytes_alone_pass() -> None:
    """Nothing else passes, and threads may be made, which libraries do. The caller sets the limit of a valid answer.
    Also one that hears no signal.
    """
    assert _call("backwards", b"abc") == b"cba"
    assert _call("threads") == b"done"
    with pytest.raises(UsageError, match="more than 2 bytes"):
        _call("backwards", b"abc", answer_bytes=2)
    began = time.monotonic()
    with pytest.raises(UsageError, match="the file was not read within 1 s"):
        _call("hang", timeout_s=1.0)
    assert time.monotonic() - began < 30


def test_an_error_of_the_farms_comes_back_as_itself_and_any_other_as_the_users() -> None:
    """Its branch says who may try again; a library's own error blames what it read."""
    with pytest.raises(ModelRefusedError, match="no such operator") as caught:
        _call("refuse")
    assert caught.value.hint == "Leave it out."
    with pytest.raises(UsageError, match="the file was not read: KeyError: 'weights'"):
        _call("stumble")


def test_what_it_may_not_do(tmp_path: pathlib.Path) -> None:
    """No file of the user's, no network, no process, no variable of the parent's is within reach."""
    assert _call("attempt", f"{tmp_path / 'secret'} {os.getpid()}".encode()) == b""
    assert (tmp_path / "secret").read_text() == "secret"


def test_what_the_user_vouches_for_has_limits_alone(tmp_path: pathlib.Path) -> None:
    """It may read the user's files; memory is still bounded."""
    limits = confined.ConfinedLimits(memory_bytes=1 << 30, timeout_s=60.0)
    answer = confined.call("confined_deeds:peek", str(tmp_path / "secret").encode(), "x", limits, trusted=True)
    assert answer == b"secret"
    with pytest.raises(UsageError, match="more than 1 GiB of memory"):
        confined.call("confined_deeds:eat", b"", "x", limits, trusted=True)


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("crash", "killed by signal 11"),
        ("eat", "more than 1 GiB of memory"),
        ("link", "gave no answer"),
        ("pretend", "the file was not read: x"),
    ],
)
def test_what_it_does_to_itself_is_an_error_of_what_it_read(tmp_path: pathlib.Path, deed: str, said: str) -> None:
    """A crash, too much memory, an answer that leads elsewhere: the file is refused, and nothing else happens."""
    with pytest.raises(UsageError, match=said):
        _call(deed, str(tmp_path / "secret").encode())
