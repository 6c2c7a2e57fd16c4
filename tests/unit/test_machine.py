"""One farm at a time on a machine, with any other writers of its temporary folder."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from farm.errors import MachineBusyError, UnavailableError
from farm.processes import machine
from farm.processes.machine import is_gone, is_here, machine_lock, process_identity

NAME = f"tvm-farm-{os.getuid()}.lock"


@pytest.fixture
def shared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder for temporary files, where there is none of one's own."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_leads_elsewhere_is_refused(shared: pathlib.Path, tmp_path: pathlib.Path, link: object) -> None:
    """A link in the lock's place does not cost the file that it leads to."""
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    link(precious, shared / NAME)  # type: ignore[operator]
    with pytest.raises(UnavailableError, match="lock"), machine_lock():
        pass
    assert precious.read_text() == "thesis"


def test_a_lock_that_is_a_pipe_is_refused(shared: pathlib.Path) -> None:
    """Nothing waits for a writer that never comes."""
    os.mkfifo(shared / NAME)
    with pytest.raises(UnavailableError, match="not a file of ours"), machine_lock():
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_lock_of_somebody_else_is_refused(shared: pathlib.Path) -> None:
    """Its maker could hold it, or read what is in it."""
    (shared / NAME).touch()
    os.chown(shared / NAME, 12345, 12345)
    with pytest.raises(UnavailableError, match="not a file of ours"), machine_lock():
        pass


def test_a_folder_of_ones_own_is_preferred(
    shared: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With XDG_RUNTIME_DIR the lock is there, and gone else can read it; one that is not there is not used."""
    own = tmp_path / "own"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    with machine_lock():
        assert (shared / NAME).exists()
    own.mkdir()
    with machine_lock():
        assert (own / NAME).stat().st_mode & 0o777 == 0o600


def test_a_second_farm_is_told_of_the_first(shared: pathlib.Path) -> None:
    """It hears which process measures, and may measure once that has ended."""
    script = "from farm.processes.machine import machine_lock\nwith machine_lock(): pass"
    environment = os.environ | {"TMPDIR": str(shared)}
    with machine_lock():
        second = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
    assert f"pid {os.getpid()}" in second.stderr
    with machine_lock():
        pass


def test_another_farm_is_waited_for(shared: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that waits says again and again for which one and how long, and goes on as soon as that has ended."""
    script = (
        "import sys; from farm.processes.machine import machine_lock\n"
        "with machine_lock(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, "/somewhere/bin/farm", "tune", "resnet18"],
        env=os.environ | {"TMPDIR": str(shared)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    said: list[str] = []

    def end(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            holder.communicate(timeout=30)

    monkeypatch.setattr(machine, "_TELL_S", 0.0)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(MachineBusyError, match="tune resnet18"), machine_lock():
        pass
    with machine_lock(30.0, end):
        pass
    assert [f"`farm tune resnet18` (pid {holder.pid})" in text and "s more at most" in text for text in said] == [
        True,
        True,
    ]


def test_a_process_is_known_by_more_than_its_hosts_name() -> None:
    """One of this name in another container may live; of one before a restart of this machine nothing is left."""
    me = process_identity()
    gone = {**me, "pid": 2**22 + 1}
    assert is_here(me)
    assert is_gone(gone)
    assert not is_gone({**gone, "namespace": "1"})
    assert not is_gone({**gone, "namespace": "1", "boot": "another"})
    on_host = {**me, "namespace": str(0xEFFFFFFC)}
    assert is_gone({**on_host, "boot": "another"}) is (me["namespace"] == on_host["namespace"])
    assert is_gone({key: gone[key] for key in ("host", "pid", "created")}), "as earlier versions wrote it"
